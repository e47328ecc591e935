"""Errors of data that a user can mend. Loads without torch, for the drivers."""


class DataError(Exception):
    """Data that cannot be used. One line: file, what is wrong, what to do."""


class TokenError(Exception):
    """Rows that cannot be tokenised as a stage needs them. One line with the row's number."""
