"""What a Spark cluster gets from us: settings from a file of the operator, and the code that its tasks run.

The program knows only the address of a cluster's master. All other settings of the cluster (its secret,
memory, cores, Kubernetes, YARN) stand in a file in the format of Spark's ``spark-defaults.conf``, which is
passed on unchanged. The settings that affect data stay ours.

Tasks run this package as the driver has it: it goes to the executors as an archive with the session, so
executors need no installation of it and never run other code. Its dependencies (PyArrow, DuckDB, NumPy …) are
not sent: the executors have them in their image, or through Spark's own ``spark.archives`` and
``spark.pyspark.python``.
"""

from __future__ import annotations

import importlib.util
import io
import re
import zipfile
from collections.abc import Collection, Mapping
from functools import cache
from hashlib import sha256
from pathlib import Path

from omnisupport_ingest.durable import replace
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.failpoints import failpoint
from omnisupport_ingest.foreign import read_file
from omnisupport_ingest.runtime.connect_address import by_socket
from omnisupport_ingest.settings import PREFIX, Settings

JAVA_OPTIONS = "spark.driver.extraJavaOptions"
"""Settings to which both sides contribute: ours come first, then those of the file."""

PYTHON = "spark.pyspark.python"
"""Spark's name for the Python interpreter of the executors."""

_PACKAGE = Path(__file__).parent.parent
_LONGEST_BYTES = 1024 * 1024
_LINE = re.compile(r"(spark\.[^\s=:]+)\s*[\s=:]\s*(.*)")
_OURS = frozenset(("spark.master", "spark.remote", "spark.driver.memory"))
_SETTING = {
    "spark.master": "SPARK_MASTER",
    "spark.remote": "SPARK_REMOTE",
    "spark.driver.memory": "SPARK_DRIVER_MEMORY",
}


class SparkPropertiesRefused(IngestError):
    """The file with settings of Spark cannot be read, or sets what is the program's to decide.

    Fix: Correct the line that the message names, or unset ``OMNISUPPORT_SPARK_PROPERTIES``.
    """

    exit_code = 2


def is_local(settings: Settings) -> bool:
    """Whether Spark runs only on this machine, in one process with its Python workers."""
    remote = settings.spark_remote
    local_server = remote is None or by_socket(remote.get_secret_value())
    return local_server and settings.spark_master.startswith("local")


def spark_properties(settings: Settings, decided: Collection[str] = ()) -> dict[str, str]:
    """Return Spark's own settings from the file that ``settings`` name; empty without a file.

    ``decided``: names that only the program may set. Raises ``SparkPropertiesRefused`` if the file has one of
    them, or is not in the format of ``spark-defaults.conf``. The message has no value, which may be a secret.
    """
    path = settings.spark_properties
    if path is None:
        return {}
    try:
        text = read_file(path, limit=_LONGEST_BYTES).decode()
    except (OSError, ValueError) as error:
        raise SparkPropertiesRefused(
            f"{path}, which {PREFIX}SPARK_PROPERTIES names, cannot be read: "
            f"{getattr(error, 'strerror', None) or 'it is no text'}.",
            fix="Name a file with a setting of Spark on each line, or unset the variable.",
        ) from error
    properties = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not (stripped := line.strip()) or stripped.startswith(("#", "!")):
            continue
        match = _LINE.fullmatch(stripped)
        if match is None or stripped.endswith("\\"):
            raise SparkPropertiesRefused(
                f"Line {number} of {path} is no setting of Spark.",
                fix="Write a name that begins with `spark.`, a space, and the value, all on one line.",
            )
        name, value = match.groups()
        if name in _OURS or name in decided:
            variable = _SETTING.get(name)
            raise SparkPropertiesRefused(
                f"Line {number} of {path} sets {name}, which is the program's to decide.",
                fix=f"Take it out and set {PREFIX}{variable}." if variable else "Take it out.",
            )
        properties[name] = _ESCAPE.sub(_meant, value)
    return properties


_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|.)")
_CONTROLS = {"n": "\n", "r": "\r", "t": "\t", "f": "\f"}


def _meant(escape: re.Match[str]) -> str:
    """Return the character that an escape sequence stands for (Java, ``Properties.load``): Spark's own
    processes read the same file."""
    text = escape[1]
    return chr(int(text[1:], 16)) if len(text) > 1 else _CONTROLS.get(text, text)


def properties_text(conf: Mapping[str, str]) -> bytes:
    """Return ``conf`` as the text of a properties file, as Java's ``Properties.load`` reads it."""
    return "".join(f"{key} {_escaped(value)}\n" for key, value in sorted(conf.items())).encode()


def _escaped(value: str) -> str:
    text = value.replace("\\", "\\\\")
    for letter, control in _CONTROLS.items():
        text = text.replace(control, f"\\{letter}")
    # Such a first character would count as part of the separator between name and value.
    return f"\\{text}" if text.startswith((" ", "=", ":")) else text


def package_archive(folder: Path) -> Path:
    """Write the package into ``folder`` as a zip archive whose name is a hash of its content. Returns its
    path."""
    content = _archived()
    path = folder / f"omnisupport_ingest-{sha256(content).hexdigest()[:16]}.zip"
    with failpoint("runtime.file"):
        replace(path, content)
    return path


@cache
def _archived() -> bytes:
    """Return the archive. Equal code gives equal bytes, so a session that has the archive accepts it
    again."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for file in sorted(each for kind in ("py", "sql", "so") for each in _PACKAGE.rglob(f"*.{kind}")):
            name = zipfile.ZipInfo(file.relative_to(_PACKAGE.parent).as_posix(), (1980, 1, 1, 0, 0, 0))
            archive.writestr(name, file.read_bytes(), zipfile.ZIP_DEFLATED, 6)
    return packed.getvalue()


def spark_home_folder() -> Path:
    """Return Spark's folder in the package ``pyspark``, without importing that: so services stay small."""
    package = importlib.util.find_spec("pyspark")
    assert package is not None and package.origin is not None
    return Path(package.origin).parent
