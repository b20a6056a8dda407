"""Everything is in ``pyproject.toml``; here only what it cannot say.

``contracts/``, ``data/``, ``reports/``, ``docs/`` and the pages beside it stand at the top of the repository
and are read from there; a built package carries copies under ``omnisupport_ingest/packaged``.

The compiled functions are optional. Without a C compiler the package is installed without them; what they
convert is then converted in Python, with the same result. They use the stable ABI of Python 3.11, so one
built package serves all later versions.
"""

import shutil
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_py import build_py

FOLDERS = ("contracts", "data", "reports", "docs")
PAGES = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "LICENSE")


class BuildWithContracts(build_py):
    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        packaged = Path(self.build_lib) / "omnisupport_ingest" / "packaged"
        shutil.rmtree(packaged, ignore_errors=True)
        for folder in FOLDERS:
            shutil.copytree(folder, packaged / folder, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
        for page in PAGES:
            shutil.copy(page, packaged / page)


def compiled(module: str) -> Extension:
    """A compiled module, whose source has its name and lies beside the modules that use it."""
    return Extension(
        module,
        [module.replace(".", "/") + ".c"],
        depends=["omnisupport_ingest/compiled_arrays.h", "omnisupport_ingest/compiled_texts.h"],
        extra_compile_args=["-O3", "-std=c11"],
        py_limited_api=True,
        optional=True,
    )


setup(
    cmdclass={"build_py": BuildWithContracts},
    ext_modules=[
        compiled("omnisupport_ingest.sources.postgres.protocol.compiled_frames"),
        compiled("omnisupport_ingest.sources.postgres.protocol.compiled_receiver"),
        compiled("omnisupport_ingest.sources.postgres.protocol.compiled_rows"),
        compiled("omnisupport_ingest.sources.debezium.compiled_lines"),
        compiled("omnisupport_ingest.contracts.compiled_images"),
        compiled("omnisupport_ingest.contracts.compiled_values"),
        compiled("omnisupport_ingest.cdc.compiled_hashes"),
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
