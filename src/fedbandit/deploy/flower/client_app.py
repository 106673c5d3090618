"""The client app that Flower runs on a device: opens the agent's folder, answers one request, and lets go of it.

The folder is `agent-dir` of the node's configuration. The app on the device uses the same folder at the same time.
With `secure-aggregation=true` there, or in `make_client_app`, what a log says leaves the device in secure sums only.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from flwr.app import Context, Message
from flwr.client.mod import secaggplus_mod
from flwr.clientapp import ClientApp

from fedbandit.deploy.device.agent import Agent
from fedbandit.deploy.device.instructions import Limits
from fedbandit.deploy.device.participant import Participant
from fedbandit.deploy.flower.secure_client import as_result, only_sums
from fedbandit.deploy.flower.transport import from_records, to_records


def make_client_app(
    *,
    open_agent: Callable[[Context], Agent] | None = None,
    trusted: Collection[str] = (),
    after_install: Callable[[Agent, Context], None] | None = None,
    secure_aggregation: bool = False,
    limits: Limits | None = None,
) -> ClientApp:
    """A client app. `open_agent` makes the agent in place of the one in `agent-dir`; `trusted` is as in `Agent`.

    With `secure_aggregation` it refuses every request for an update, or for sums of its log alone, in clear.
    `limits` are the most that it does for a server.
    """

    def of_node(context: Context) -> Agent:
        return Agent(Path(str(context.node_config["agent-dir"])), trusted=trusted)

    def secure(context: Context) -> bool:
        return secure_aggregation or bool(context.node_config.get("secure-aggregation", False))

    @contextmanager
    def participant_of(context: Context) -> Iterator[Participant]:
        def installed(agent: Agent) -> None:
            if after_install is not None:
                after_install(agent, context)

        with (open_agent or of_node)(context) as agent:
            yield Participant(agent, trusted=trusted, after_install=installed, limits=limits)

    def answer(kind: str, message: Message, context: Context) -> Message:
        with participant_of(context) as participant:
            said = participant.answer(kind, *from_records(message.content))
        return Message(to_records(*said), reply_to=message)

    app = ClientApp(mods=[only_sums(secure), secaggplus_mod])

    @app.query("fedbandit_install")
    def install(message: Message, context: Context) -> Message:
        return answer("install", message, context)

    @app.query("fedbandit_ready")
    def ready(message: Message, context: Context) -> Message:
        return answer("ready", message, context)

    @app.query("fedbandit_judge")
    def judge(message: Message, context: Context) -> Message:
        return answer("judge", message, context)

    @app.train("fedbandit_round")
    def train(message: Message, context: Context) -> Message:
        return answer("train", message, context)

    @app.train()
    def contribute(message: Message, context: Context) -> Message:
        with participant_of(context) as participant:
            vector = participant.contribute(*from_records(message.content))
        return Message(as_result(vector), reply_to=message)

    return app


app = make_client_app()
