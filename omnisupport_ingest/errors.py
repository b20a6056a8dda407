"""The base class of every error that a person may see: what is wrong, and how to fix it."""


class IngestError(Exception):
    """A problem with its fix, both written for the person who reads them.

    ``problem`` names the file, row or setting and the value seen; ``fix`` is the next thing to do.
    Neither may hold a password or the values of a data row. ``exit_code`` is what the command
    line exits with; packages define subclasses where a caller must tell two problems apart.

    A subclass has a row in docs/errors.md: the first paragraph of its docstring says what has happened, and
    the one that begins with ``Fix:`` what to do. What no person meets, as it only steers the program, derives
    from ``Exception``.
    """

    exit_code = 1

    def __init__(self, problem: str, *, fix: str) -> None:
        super().__init__(problem)
        self.problem = problem
        self.fix = fix

    def __str__(self) -> str:
        return f"{self.problem}\nFix: {self.fix}"
