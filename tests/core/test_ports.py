"""Ports for servers that start later."""

from __future__ import annotations

import socket

import pytest

from kvhandoff import web


def test_a_free_port_can_be_bound_and_is_not_the_systems_to_give():
    port = web.free_port()
    assert 1024 < port < 32768
    with socket.socket() as server:
        server.bind(("127.0.0.1", port))


def test_a_port_in_use_is_not_free(monkeypatch: pytest.MonkeyPatch):
    port = web.free_port()
    monkeypatch.setattr(web, "_LATER_PORTS", [port] * 64)
    monkeypatch.setattr(web, "_given", set())
    with socket.socket() as server:
        server.bind(("127.0.0.1", port))
        with pytest.raises(OSError, match="no free port on 127"):
            web.free_port()
    assert web.free_port() == port


def test_no_port_is_given_twice(monkeypatch: pytest.MonkeyPatch):
    """Its server may not listen yet when the next one is asked for."""
    ports = [web.free_port() for _ in range(2)]
    monkeypatch.setattr(web, "_LATER_PORTS", ports * 32)
    monkeypatch.setattr(web, "_given", set())
    assert {web.free_port(), web.free_port()} == set(ports)
    with pytest.raises(OSError, match="no free port on 127"):
        web.free_port()
