"""PostgreSQL connections: the server's address and options, and the translation of its errors.

The password is never printed or passed on: `url` omits it, and only the driver gets it.
"""

from __future__ import annotations

import logging
import re
import time
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import psycopg
from psycopg import conninfo
from psycopg.rows import DictRow, dict_row
from psycopg.types.numeric import Int8Dumper

from agentrl.errors import Invalid, StoreError, Unavailable
from agentrl.store.postgres.backend import split_password
from agentrl.store.sql.database import Parameters, Statement

log = logging.getLogger("agentrl.store")
STARTING_PATIENCE = 60.0  # seconds to wait for a server that says that it is starting or stopping
REFUSED_PATIENCE = 3.0  # seconds to wait for one that refuses connections: it may be restarting
RETRY_PAUSE = 0.2  # seconds between two tries
CONNECT_TIMEOUT = 10  # seconds to establish a connection
POOLER_CHECKS = 10  # that another client of a pooler takes the server process between, each time
WHO = "select pg_backend_pid() as pid, pg_postmaster_start_time() as since"
# What a role, a database or the server's configuration sets for all programs and a store cannot
# have: limits of time that end an enqueue or an idle writer, and an isolation that fails updates.
# The options of the URL stay.
SETTINGS = """select set_config(name, case name when 'default_transaction_isolation'
    then 'read committed' else '0' end, false) from pg_settings where source <> 'client'
    and name in ('statement_timeout', 'lock_timeout', 'transaction_timeout',
    'idle_in_transaction_session_timeout', 'idle_session_timeout', 'default_transaction_isolation')
"""
ADVICE = (
    ("password authentication failed", "check user and password"),
    ("no password supplied", "set PGPASSWORD, or put the password into the URL or ~/.pgpass"),
    ("database .* does not exist", "create it with createdb, or check the name"),
    ("role .* does not exist", "check the user's name"),
    ("permission denied", "let this user create tables there, or choose another database"),
    ("no schema has been selected", "create the schema that the URL's search_path names"),
    ("too many clients|remaining connection slots", "raise max_connections of the server"),
    (
        "(statement|lock|session|transaction) timeout",
        "remove the limit of time from the options of the URL or PGOPTIONS, or raise it",
    ),
    ("query_wait_timeout", "its pooler has too few connections: raise its pool_size"),
    ("refused|No such file|could not translate|resolve|timeout|timed out", "is it running there?"),
)


class PostgresConnection:
    """A psycopg connection that executes statements of `load_sql`."""

    def __init__(self, raw: psycopg.Connection[DictRow]) -> None:
        self.raw = raw

    def execute(self, sql: str, parameters: Parameters | None = None, /) -> psycopg.Cursor[DictRow]:
        if isinstance(sql, Statement):
            return self.raw.execute(sql.postgres.encode(), parameters or ())
        return self.raw.execute(sql.encode(), parameters)


@dataclass(frozen=True, slots=True)
class PostgresServer:
    """A database by its URL, with libpq's options; `url` has no password."""

    url: str
    password: str | None = field(default=None, repr=False)
    readonly: bool = False  # no connection may write

    @classmethod
    def parse(cls, url: str, *, readonly: bool = False) -> PostgresServer:
        public, password = split_password(url)
        try:
            conninfo.conninfo_to_dict(public)
        except psycopg.ProgrammingError as error:
            raise Invalid(
                f"Store URL {public!r} is not understood ({str(error).strip()}): use "
                "postgresql://user@host/database."
            ) from error
        return cls(public, password, readonly)

    @property
    def options(self) -> dict[str, Any]:
        """Defaults of options that the URL does not set: detect a lost server in half a minute."""
        given = conninfo.conninfo_to_dict(self.url)
        ours = {
            "connect_timeout": CONNECT_TIMEOUT,
            "application_name": "agentrl",
            "keepalives_idle": 10,
            "keepalives_interval": 5,
            "keepalives_count": 3,
        }
        secret = {} if self.password is None else {"password": self.password}
        return {name: ours[name] for name in ours if name not in given} | secret

    def connect(self) -> psycopg.Connection[DictRow]:
        """Open a connection in autocommit mode: transactions begin explicitly."""
        conn = self._connect()
        configure(conn)
        if self.readonly:
            conn.execute("set default_transaction_read_only = on")
        return conn

    def _connect(self) -> psycopg.Connection[DictRow]:
        return psycopg.connect(self.url, autocommit=True, row_factory=dict_row, **self.options)

    def check_sessions(self) -> None:
        """Raise StoreError if two connections share a server process, as behind a pooler that
        lends one for a transaction only: prepared statements and settings would be another
        client's, and notifications lost. Sets nothing, since others would get that too."""
        with closing(self._connect()) as one, closing(self._connect()) as other:
            first, pids = None, (one.info.backend_pid, other.info.backend_pid)
            for _ in range(POOLER_CHECKS):
                mine, others = (_one(conn.execute(WHO, prepare=False)) for conn in (one, other))
                if mine == others or mine != (first or mine):
                    raise StoreError(
                        f"Store {self.url}: a connection pooler there (such as pgbouncer) lends "
                        "server processes for a transaction or a statement only, and a store needs "
                        "its own for a session; give the address of the database itself or of the "
                        "pooler's session mode (pool_mode = session)."
                    )
                first = mine
                if (mine["pid"], others["pid"]) == pids:
                    return  # a pooler has numbers of its own

    def wait(self) -> None:
        """Wait until the server accepts connections, if it is restarting. Raises psycopg.Error if
        it does not."""
        since, warned = time.monotonic(), False
        while True:
            try:
                self._connect().close()
                return
            except psycopg.OperationalError as error:
                why = _server_message(error)
                if time.monotonic() - since >= _patience(why):
                    raise
                if not warned:
                    log.warning("Store %s: %s; waiting for it", self.url, why)
                warned = True
            time.sleep(RETRY_PAUSE)

    def vacuum(self) -> None:
        """Rewrite the tables without free space. Readers and writers of a table wait."""
        try:
            with closing(self.connect()) as conn:
                conn.execute("vacuum (full, analyze)")
        except psycopg.Error as error:
            raise self.to_store_error(error) from error

    def to_store_error(self, error: Exception) -> Exception:
        if isinstance(error, psycopg.DataError | psycopg.IntegrityError | UnicodeError):
            return Invalid(f"A value cannot be stored: {_server_message(error)}.")
        if not isinstance(error, psycopg.Error):
            return error
        message = _server_message(error)
        if isinstance(error, psycopg.errors.DiskFull):
            message = "the server's disk is full; free some space and run the same command again"
        advice = next((text for pattern, text in ADVICE if re.search(pattern, message)), None)
        return Unavailable(f"Store {self.url}: {message}{f'; {advice}' if advice else ''}.")


def configure(conn: psycopg.Connection[Any]) -> None:
    """Send booleans as integers, and all integers with one size: each statement is then prepared
    only once. Set what a store needs of a session, see `SETTINGS`."""
    conn.adapters.register_dumper(int, Int8Dumper)
    conn.adapters.register_dumper(bool, _FlagDumper)
    conn.execute(SETTINGS)


class _FlagDumper(Int8Dumper):
    def dump(self, obj: bool) -> bytes:
        return b"1" if obj else b"0"


def _one(rows: psycopg.Cursor[DictRow]) -> DictRow:
    (row,) = rows
    return row


def _patience(why: str) -> float:
    if re.search("starting up|shutting down|recovery|not yet accepting", why):
        return STARTING_PATIENCE
    return REFUSED_PATIENCE if re.search("refused|No such file", why) else 0.0


def _server_message(error: Exception) -> str:
    """Return the server's message without the driver's list of tried addresses."""
    primary = error.diag.message_primary if isinstance(error, psycopg.Error) else None
    lines = (primary or str(error) or type(error).__name__).strip().splitlines()
    return re.sub(r"^.*(?:FATAL|ERROR):\s+", "", lines[0]).rstrip(".")
