"""Sends alarms through a command of the operator, a webhook, or both; and sends heartbeats."""

from __future__ import annotations

import json
import subprocess
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.settings import PREFIX, Settings

_SECONDS = 20.0
_SCHEMES = ("http://", "https://")


class AlarmNotSent(IngestError):
    """The alarm command failed, or the address of an alarm or of the sign of life did not take it.

    Fix: Correct ``OMNISUPPORT_ALARM_COMMAND``, ``OMNISUPPORT_ALARM_WEBHOOK`` or
    ``OMNISUPPORT_HEARTBEAT_URL``; it is tried again until it works.
    """


def send_alarm(settings: Settings, document: Mapping[str, Any]) -> bool:
    """Send ``document`` to the command and the webhook that the settings name. Returns whether they name any.

    The command reads it as JSON on its standard input; the webhook gets it as a POST. Both are tried. If
    one fails, ``AlarmNotSent`` says which and how; it repeats neither the address nor an answer.
    """
    text = json.dumps(document).encode()
    faults = []
    if settings.alarm_command is not None:
        faults.append(_run(settings.alarm_command, text))
    if settings.alarm_webhook is not None:
        faults.append(_ask(settings.alarm_webhook.get_secret_value(), text, "alarm webhook"))
    wrong = [fault for fault in faults if fault is not None]
    if wrong:
        raise AlarmNotSent(
            " ".join(wrong),
            fix=f"Correct {PREFIX}ALARM_COMMAND or {PREFIX}ALARM_WEBHOOK; it is tried again until it works.",
        )
    return bool(faults)


def send_heartbeat(settings: Settings) -> None:
    """Request the heartbeat address, if the settings name one. Raises ``AlarmNotSent`` if it does not
    answer."""
    if settings.heartbeat_url is None:
        return
    fault = _ask(settings.heartbeat_url.get_secret_value(), None, "heartbeat")
    if fault is not None:
        raise AlarmNotSent(fault, fix=f"Correct {PREFIX}HEARTBEAT_URL; it is tried again by every look.")


def _run(command: str, text: bytes) -> str | None:
    try:
        done = subprocess.run(  # noqa: S602 - a command line of the operator's own
            command, shell=True, input=text, capture_output=True, timeout=_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return f"The alarm command did not end within {_SECONDS:.0f} seconds."
    return None if done.returncode == 0 else f"The alarm command ended with code {done.returncode}."


def _ask(address: str, text: bytes | None, name: str) -> str | None:
    """Request ``address``: POST ``text``, or GET if there is none. Returns what went wrong, in words without
    the address; None if nothing did."""
    if not address.startswith(_SCHEMES):
        return f"The {name} is no http or https address."
    headers = {} if text is None else {"Content-Type": "application/json"}
    request = urllib.request.Request(address, data=text, headers=headers)  # noqa: S310 - it is checked above
    try:
        with urllib.request.urlopen(request, timeout=_SECONDS):  # noqa: S310
            return None
    except urllib.error.HTTPError as error:
        return f"The {name} answered {error.code}."
    except (OSError, ValueError) as error:
        return f"The {name} cannot be reached: {type(error).__name__}."
