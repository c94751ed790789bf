#!/usr/bin/env bash
# Installs a Valkey or Redis server for the tests of the shared index, where there is none and it may: as root, on a
# system with apt. Elsewhere those tests are skipped, and the last lines of the run say so. The service that the
# package brings is not needed, as each test starts a server of its own.
set -euo pipefail

if command -v valkey-server > /dev/null || command -v redis-server > /dev/null; then
    exit 0
fi
if [ "$(id -u)" != 0 ] || ! command -v apt-get > /dev/null; then
    echo "there is no valkey-server or redis-server, and no right to install one"
    exit 0
fi

install() {
    # In runlevel 1 no service is started.
    RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive \
        apt-get --quiet=2 -o Dpkg::Use-Pty=0 install --no-install-recommends redis-server > /dev/null
}
install || { apt-get --quiet=2 update && install; } || { echo "redis-server can't be installed here"; exit 0; }
if [ -d /run/systemd/system ]; then
    systemctl disable --now redis-server
elif [ -x /etc/init.d/redis-server ]; then
    /etc/init.d/redis-server stop > /dev/null || true  # it doesn't run, most likely
fi
