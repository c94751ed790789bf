"""The handoff protocol, sans-IO: events in, effects out. No sockets, threads, clocks or engine types."""
