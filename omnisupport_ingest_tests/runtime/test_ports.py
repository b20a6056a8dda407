"""Ports: free ones are found, taken ones refused by number."""

from __future__ import annotations

import socket

import pytest

from omnisupport_ingest.runtime.ports import LOOPBACK, PortTaken, answers, free_port, require_port


def test_a_taken_port_is_refused_with_its_number_and_the_setting_to_change() -> None:
    with socket.create_server((LOOPBACK, 0)) as server:
        port = server.getsockname()[1]
        assert answers(port)
        with pytest.raises(PortTaken) as told:
            require_port(port, "OMNISUPPORT_WEBSERVER_PORT")
    assert f"Port {port} " in told.value.problem
    assert "OMNISUPPORT_WEBSERVER_PORT" in told.value.fix
    assert require_port(port, "OMNISUPPORT_WEBSERVER_PORT") == port


def test_port_zero_means_any_free_one() -> None:
    port = require_port(0, "OMNISUPPORT_WEBSERVER_PORT")
    assert port > 0
    assert not answers(port)
    assert free_port() > 0
