"""Errors of data that a user can mend. Loads without torch, for the drivers."""


class DataError(Exception):
    """Data that cannot be used. One line: file, what is wrong, what to do."""


class BadRow(Exception):
    """A row that cannot be used. `reason`: what is counted, the same words for all rows like it; the message: more."""

    def __init__(self, reason: str, detail: str = ""):
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


class TokenError(Exception):
    """Rows that cannot be tokenised as a stage needs them. One line with the row's number. `reason`: as BadRow's."""

    def __init__(self, message: str, reason: str | None = None):
        super().__init__(message)
        self.reason = reason or message
