"""`agentrl mcp` and `agentrl skill`: tools and instructions for coding agents."""

from __future__ import annotations

import signal
import socket
from pathlib import Path

import click

from agentrl.core.errors import ConfigError, install_command

SKILL = Path(__file__).with_name("SKILL.md")
# Where each program looks for skills, below a project's folder or, with --user, the home folder.
FOLDERS = {
    "claude": ".claude/skills",
    "codex": ".agents/skills",  # as agentskills.io specifies
    "gemini": ".agents/skills",
    "opencode": ".agents/skills",
    "pi": ".pi/skills",
    "qwen": ".qwen/skills",
}
USER_FOLDERS = FOLDERS | {"pi": ".pi/agent/skills"}
MARK = "<!-- agentrl skill -->"
NOTE = f"""{MARK}
To train the model behind an agent with agentrl, read {{}} first.
"""


@click.command()
@click.option("--store", help="URL of the only store to show; default: all below runs/.")
@click.option("--allow-start", is_flag=True, help="Let it start and stop runs, which run code.")
@click.option("--http", is_flag=True, help="Serve by HTTP instead of standard input and output.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address, with --http.")
@click.option("--port", default=7413, show_default=True, help="Port, with --http.")
@click.option(
    "--key-env", default="AGENTRL_MCP_KEY", show_default=True, help="Variable with the HTTP key."
)
def mcp(
    store: str | None, allow_start: bool, http: bool, host: str, port: int, key_env: str
) -> None:
    """Serve the runs of this folder to coding agents, by the Model Context Protocol.

    Runs are only read, unless --allow-start. Register it by `claude mcp add agentrl -- agentrl
    mcp`, `codex mcp add agentrl -- agentrl mcp` or the like."""
    try:
        from agentrl.cli import mcp_server
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error.name} is missing: {install_command('mcp')}") from None
    from agentrl.cli.mcp_server import Runs

    # A parent may ignore SIGINT, which runs that this server starts would inherit.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    server = mcp_server.make(Runs(Path.cwd().resolve(), store), allow_start=allow_start)
    if not http:
        server.run("stdio")
        return
    import uvicorn

    from agentrl.core.access import Access, read_key

    access = Access((read_key(key_env, "--key-env", "this server's"),))
    try:
        listening = socket.create_server((host, port))
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}") from None
    host, port = listening.getsockname()[:2]
    click.echo(
        f"Serving http://{host}:{port}/mcp to clients that send Authorization: Bearer ${key_env}"
    )
    app = mcp_server.with_key(server.streamable_http_app(host=host), access)
    uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listening])


@click.command()
@click.argument("program", type=click.Choice([*FOLDERS, "agents-md"]), required=False)
@click.option("--user", is_flag=True, help="For all projects of this user, not only this folder.")
def skill(program: str | None, user: bool) -> None:
    """Print the skill: instructions with which a coding agent can train an agent. With PROGRAM, a
    coding agent, install it where that program looks for skills.

    Replaces an older version. For any other program use agents-md, which also adds a line to
    AGENTS.md."""
    if program is None:
        click.echo(SKILL.read_text(encoding="utf-8"), nl=False)
        return
    base = Path.home() if user else Path()
    folder = (USER_FOLDERS if user else FOLDERS).get(program, ".agents/skills")
    file = base / folder / "agentrl" / "SKILL.md"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(SKILL.read_text(encoding="utf-8"), encoding="utf-8")
        click.echo(f"Wrote {file}")
        if program == "agents-md":
            note(base / "AGENTS.md", file)
    except OSError as error:
        raise ConfigError(f"cannot write {file} ({error.strerror})") from None


def note(page: Path, file: Path) -> None:
    """Name the skill in a project's AGENTS.md, once."""
    text = page.read_text(encoding="utf-8") if page.exists() else ""
    if MARK not in text:
        page.write_text(f"{text.rstrip()}\n\n{NOTE.format(file)}".lstrip(), encoding="utf-8")
        click.echo(f"Added a line to {page}")
