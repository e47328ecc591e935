"""What all commands of `rlhf` share: faults of the user's are one line, and exit code 1."""

from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import typer

from flows.services import ServicesError
from rlhf_core.config.base import SettingsError
from rlhf_core.store.backends import StoreError


@contextmanager
def one_line_errors(*further: type[Exception]) -> Iterator[None]:
    try:
        yield
    except (SettingsError, ServicesError, StoreError, httpx.HTTPError, OSError, *further) as error:
        typer.echo(f"error: {' '.join(str(error).split())}", err=True)
        raise typer.Exit(1) from None
