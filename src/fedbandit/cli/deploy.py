"""Commands for real devices: a server, a device's node, what has happened so far, and the way back."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from fedbandit.deploy.flower.processes import Security

app = typer.Typer(
    help="Run rounds over real devices with Flower.", no_args_is_help=True, add_completion=False, rich_markup_mode=None
)
_Ca = Annotated[Path | None, typer.Option("--ca", help="Certificate of the authority that signed the server's.")]
_State = Annotated[Path, typer.Argument(metavar="STATE", help="The server's state folder.")]


@app.command()
def server(
    toml: Annotated[Path, typer.Argument(metavar="TOML", help="What to deploy; see docs/deployment.md.")],
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen at.")] = 8000,
    ca: _Ca = None,
    certificate: Annotated[Path | None, typer.Option(help="The server's certificate.")] = None,
    key: Annotated[Path | None, typer.Option(help="The server's private key.")] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="No TLS: on loopback or a network you trust.")] = False,
) -> None:
    """Run the rounds of a deployment, or go on where they stopped."""
    from fedbandit.deploy.flower.operate import serve

    serve(toml, host, port, _security(insecure, ca=ca, certificate=certificate, key=key))
    print("all rounds are done")


@app.command()
def client(
    agent: Annotated[Path, typer.Argument(metavar="FOLDER", help="The agent's folder on this device.")],
    superlink: Annotated[str, typer.Option("--server", metavar="HOST:PORT", help="Where the server listens.")],
    ca: _Ca = None,
    key: Annotated[Path | None, typer.Option(help="This node's private key, in OpenSSH's format.")] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="No TLS: on loopback or a network you trust.")] = False,
    secure_aggregation: Annotated[
        bool, typer.Option("--secure-aggregation", help="Let updates leave this device only inside secure sums.")
    ] = False,
) -> None:
    """Let a device take part: train on its agent's log whenever the server asks. Runs until Ctrl-C."""
    from fedbandit.deploy.flower.operate import take_part

    take_part(agent, superlink, _security(insecure, ca=ca, node_key=key), secure_aggregation)


@app.command()
def register(
    state: _State,
    public_key: Annotated[Path, typer.Argument(metavar="KEY.pub", help="The node's public key.")],
    name: Annotated[str, typer.Option(help="What to call the node.")],
) -> None:
    """Let the node with that key take part; the server must be running with TLS."""
    from fedbandit.deploy.flower.operate import register_node

    register_node(state / "flower", public_key, name)
    print(f"{name} may take part")


@app.command()
def status(
    state: _State, as_json: Annotated[bool, typer.Option("--json", help="As JSON, for programs.")] = False
) -> None:
    """Show rounds, participation, reward, privacy spent and model versions."""
    import json

    from fedbandit.deploy.server.store import in_lines, read_status

    found = read_status(state)
    print(json.dumps(found, indent=2) if as_json else "\n".join(in_lines(found)))


@app.command()
def rollback(
    state: _State, version: Annotated[int, typer.Argument(help="One of the kept versions; see `status`.")]
) -> None:
    """Go back to an earlier model: devices get it as a new version, and training starts from it again."""
    from fedbandit.deploy.server.store import ask_rollback

    ask_rollback(state, version)
    print(f"the server will go back to model {version} at its next round")


def _security(insecure: bool, **files: Path | None) -> "Security":
    from fedbandit.core.errors import ConfigError
    from fedbandit.deploy.flower.processes import Security

    if insecure:
        if any(files.values()):
            raise ConfigError("--insecure: leave it out where certificates are given")
        return Security()
    for name, path in files.items():
        option = f"--{name.replace('node_', '')}"
        if path is None:
            raise ConfigError(f"{option}: missing; or --insecure for no protection at all")
        if not path.is_file():
            raise ConfigError(f"{option}: {path}: no such file")
    return Security(**files)
