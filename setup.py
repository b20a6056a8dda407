"""Everything is in ``pyproject.toml``; here only what it cannot say.

``contracts/``, ``data/``, ``reports/``, ``docs/`` and the pages beside it stand at the top of the repository
and are read from there; a built package carries copies under ``omnisupport_ingest/packaged``.
"""

import shutil
from pathlib import Path

from setuptools import setup
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


setup(cmdclass={"build_py": BuildWithContracts})
