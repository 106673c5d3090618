"""A device's app as a process of its own: decides and rewards until it is killed, and says what it has been told.

Each line it prints is a promise that it got from the agent: `made <id> <action> <propensity>` after a decision,
`rewarded <id> <value>` after a reward. Run as `python device_process.py FOLDER SEED [COUNT]`.
"""

import random
import sys
import threading

from fedbandit.deploy import Agent, Outcome


def live(folder: str, seed: int, count: int | None = None, out=sys.stdout) -> None:
    rng = random.Random(seed)
    waiting: list[str] = []
    with Agent(folder, timeout=60) as agent:
        done = 0
        while count is None or done < count:
            done += 1
            decision = agent.choose(["cat", "mat", "the"][: rng.randint(1, 3)])
            out.write(f"made {decision.event_id} {decision.action} {decision.propensity!r}\n")
            out.flush()
            waiting.append(decision.event_id)
            while waiting and rng.random() < 0.45:
                event = waiting.pop(rng.randrange(len(waiting)))
                value = rng.random()
                outcome = agent.reward(event, value)
                if rng.random() < 0.3:  # a nervous app asks twice
                    assert agent.reward(event, value + 1) is not Outcome.RECORDED
                if outcome is Outcome.RECORDED:
                    out.write(f"rewarded {event} {value!r}\n")
                    out.flush()


def live_in_threads(folder: str, threads: int, count: int) -> list[str]:
    """Several threads with one agent; the ids they were given."""
    given: list[str] = []
    with Agent(folder, timeout=60) as agent:

        def work(number: int) -> None:
            for _ in range(count):
                decision = agent.choose("cat mat")
                agent.reward(decision.event_id, float(number))
                given.append(decision.event_id)

        running = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
    return given


if __name__ == "__main__":
    live(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else None)
