"""The client app that Flower runs on a device: opens the agent's folder, answers one request, and lets go of it.

The folder is `agent-dir` of the node's configuration. The app on the device uses the same folder at the same time.
"""

from collections.abc import Callable, Collection
from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedbandit.deploy.agent import Agent
from fedbandit.deploy.flower.participant import Participant
from fedbandit.deploy.flower.records import from_records, to_records


def make_client_app(
    *,
    open_agent: Callable[[Context], Agent] | None = None,
    trusted: Collection[str] = (),
    after_install: Callable[[Agent, Context], None] | None = None,
) -> ClientApp:
    """A client app. `open_agent` makes the agent in place of the one in `agent-dir`; `trusted` is as in `Agent`."""

    def of_node(context: Context) -> Agent:
        return Agent(Path(str(context.node_config["agent-dir"])), trusted=trusted)

    def answer(kind: str, message: Message, context: Context) -> Message:
        def installed(agent: Agent) -> None:
            if after_install is not None:
                after_install(agent, context)

        with (open_agent or of_node)(context) as agent:
            participant = Participant(agent, trusted=trusted, after_install=installed)
            return Message(
                to_records(*participant.answer(kind, *from_records(message.content))),
                reply_to=message,
            )

    app = ClientApp()

    @app.query("fedbandit_install")
    def install(message: Message, context: Context) -> Message:
        return answer("install", message, context)

    @app.train("fedbandit_round")
    def train(message: Message, context: Context) -> Message:
        return answer("train", message, context)

    return app


app = make_client_app()
