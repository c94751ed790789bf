#!/usr/bin/env bash
# Installs a Valkey or Redis server for the tests of the shared index, where there is none and it may: as root, on a
# system with apt. Elsewhere those tests are skipped, and the last lines of the run say so. The service that the
# package brings is not needed: each test starts a server of its own.
set -euo pipefail

if command -v valkey-server redis-server > /dev/null; then
    exit 0
fi
if [ "$(id -u)" != 0 ] || ! command -v apt-get > /dev/null; then
    echo "no valkey-server or redis-server, and no right to install one"
    exit 0
fi
apt_get() { DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 apt-get --quiet=2 -o Dpkg::Use-Pty=0 "$@"; }
if ! apt_get install --no-install-recommends redis-server && ! { apt_get update && apt_get install --no-install-recommends redis-server; }; then
    echo "redis-server can't be installed here"
    exit 0
fi
# Not where it is in use: it was not there before.
if command -v systemctl > /dev/null && [ -d /run/systemd/system ]; then
    systemctl disable --now redis-server
elif [ -x /etc/init.d/redis-server ]; then
    /etc/init.d/redis-server stop || true
fi
