"""`fedbandit deploy`: the server, a device's node, status and rollback of a deployment on real devices."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedbandit.cli.help import Commands

if TYPE_CHECKING:
    from fedbandit.deploy.flower.operate import Security

app = Commands("Run training rounds on real devices with Flower.")
_Ca = Annotated[
    Path | None, typer.Option("--ca", help="Certificate of the authority that signed the server certificate.")
]
_State = Annotated[Path, typer.Argument(metavar="STATE", help="The server's state folder.")]


@app.command()
def server(
    toml: Annotated[Path, typer.Argument(metavar="TOML", help="The deployment; see docs/deployment.md.")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 8000,
    ca: _Ca = None,
    certificate: Annotated[Path | None, typer.Option(help="The server certificate.")] = None,
    key: Annotated[Path | None, typer.Option(help="The server's private key.")] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Use no TLS, on loopback or a trusted network.")] = False,
) -> None:
    """Run the rounds of a deployment, or resume them."""
    from fedbandit.deploy.flower.operate import serve
    from fedbandit.deploy.server.deployment import read_deployment

    read_deployment(toml)  # a wrong file is reported before missing certificates
    serve(toml, host, port, _security(insecure, ca=ca, certificate=certificate, key=key))
    print("all rounds are done")


@app.command()
def client(
    agent: Annotated[Path, typer.Argument(metavar="FOLDER", help="The agent's folder on this device.")],
    superlink: Annotated[str, typer.Option("--server", metavar="HOST:PORT", help="The address of the server.")],
    ca: _Ca = None,
    key: Annotated[Path | None, typer.Option(help="This node's private key, in OpenSSH's format.")] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Use no TLS, on loopback or a trusted network.")] = False,
    secure_aggregation: Annotated[
        bool, typer.Option("--secure-aggregation", help="Send updates by secure aggregation only.")
    ] = False,
) -> None:
    """Let this device take part until Ctrl-C.

    It trains on its agent's log whenever the server asks.
    """
    from fedbandit.deploy.flower.operate import take_part

    take_part(agent, superlink, _security(insecure, ca=ca, node_key=key), secure_aggregation)


@app.command()
def register(
    state: _State,
    public_key: Annotated[Path, typer.Argument(metavar="KEY.pub", help="The node's public key.")],
    name: Annotated[str, typer.Option(help="A name for the node.")],
) -> None:
    """Allow a node to take part; the server must run with TLS."""
    from fedbandit.deploy.flower.operate import register_node

    register_node(state / "flower", public_key, name)
    print(f"{name} may take part")


@app.command()
def status(state: _State, as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Show rounds, participation, reward, privacy and versions."""
    import json

    from fedbandit.deploy.server.store import in_lines, read_status

    found = read_status(state)
    print(json.dumps(found, indent=2) if as_json else "\n".join(in_lines(found)))


@app.command()
def rollback(
    state: _State, version: Annotated[int, typer.Argument(help="One of the versions that `status` lists.")]
) -> None:
    """Return to an earlier model version.

    Devices receive it as a new version, and training continues from it.
    """
    from fedbandit.deploy.server.store import ask_rollback

    ask_rollback(state, version)
    print(f"the server will roll back to model {version} at its next round")


def _security(insecure: bool, **files: Path | None) -> "Security":
    from fedbandit.core.errors import ConfigError
    from fedbandit.deploy.flower.operate import Security

    if insecure:
        if any(files.values()):
            raise ConfigError("--insecure: cannot be combined with certificates")
        return Security()
    for name, path in files.items():
        option = f"--{name.replace('node_', '')}"
        if path is None:
            raise ConfigError(f"{option}: missing; use --insecure to run without TLS")
        if not path.is_file():
            raise ConfigError(f"{option}: {path}: no such file")
    return Security(**files)
