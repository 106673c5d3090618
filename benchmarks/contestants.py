"""Running contestants side by side: each in a process of its own, taking turns of a round or half a second."""

import json
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parent
VENVS = HERE / ".venvs"
_TICK = os.sysconf("SC_CLK_TCK")
_TURN = 0.5  # seconds
LONGEST_WAIT = 600.0  # seconds for an answer: the slowest set-up takes one minute


@dataclass(frozen=True)
class Contestant:
    """A program that plays rounds when asked: `script` under peers/, in the environment of that name."""

    name: str
    script: str
    arguments: tuple[str, ...]
    environment: str | None = None  # None: the one this runs in

    def python(self) -> Path:
        return (
            Path(sys.executable)
            if self.environment is None
            else VENVS / self.environment / "bin" / "python"
        )


@dataclass
class Measured:
    """What a contestant's rounds took."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)  # of the process and all its children
    load: list[float] = field(default_factory=list)  # of the machine when the round began
    memory: int = 0  # peak resident bytes, summed over its processes
    error: str | None = None


class Running:
    """A contestant's process."""

    def __init__(self, contestant: Contestant, log: Path) -> None:
        self.contestant, self.measured = contestant, Measured()
        self._log = open(log, "w")  # noqa: SIM115 - stays open as long as the process
        command = [
            str(contestant.python()),
            str(HERE / "peers" / contestant.script),
            *contestant.arguments,
        ]
        environment = {
            **os.environ,
            "OMP_WAIT_POLICY": "PASSIVE",
            "PYTHONPATH": str(HERE / "peers"),
        }
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=environment,
        )
        self._expect("ready")

    def play(self, keep: bool = True) -> None:
        """One turn: rounds until half a second has passed, and at least one; those for warming up are not kept.

        Short rounds are many to a turn: one alone would be measured with the caches that the others have left behind.
        """
        load, cpu = os.getloadavg()[0], _cpu_seconds(self._process.pid)
        wall: list[float] = []
        while not self.measured.error and sum(wall) < _TURN:
            wall.append(self._round())
        self.measured.memory = max(self.measured.memory, _peak_memory(self._process.pid))
        if keep and not self.measured.error:
            self.measured.wall.append(sum(wall) / len(wall))
            self.measured.cpu.append((_cpu_seconds(self._process.pid) - cpu) / len(wall))
            self.measured.load.append(load)

    def _round(self) -> float:
        """The seconds that one round took."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write("round\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            self.measured.error = "ended by itself"
            return 0.0
        answer = self._expect("{")
        return float(json.loads(answer)["seconds"]) if answer else 0.0

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):  # it has ended already
            self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._process.stdout.close()
        self._log.close()

    def _expect(self, start: str) -> str:
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], LONGEST_WAIT)[0]:
            for member in _family(self._process.pid):
                with suppress(ProcessLookupError):
                    os.kill(member, signal.SIGKILL)
            self.measured.error = f"no answer within {LONGEST_WAIT:g} s; see {self._log.name}"
            return ""
        line = self._process.stdout.readline()
        if not line.startswith(start):
            self._log.flush()
            lines = Path(self._log.name).read_text(errors="replace").strip().splitlines()
            self.measured.error = lines[-1] if lines else "ended without a word"
            return ""
        return line


def take_turns(
    contestants: list[Contestant], turns: int, logs: Path, warm_up: int = 1
) -> dict[str, Measured]:
    """Let each have so many turns, one of A, one of B, ..., then again; those that cannot start are reported."""
    logs.mkdir(parents=True, exist_ok=True)
    running = []
    results = {}
    for contestant in contestants:
        if not contestant.python().exists():
            results[contestant.name] = Measured(error="not installed")
            continue
        started = time.perf_counter()
        one = Running(
            contestant, logs / f"{contestant.name.replace(' ', '-').replace('/', '-')}.log"
        )
        results[contestant.name] = one.measured
        for _ in range(warm_up):
            one.play(keep=False)
        outcome = (
            one.measured.error or f"set up and warm after {time.perf_counter() - started:.1f} s"
        )
        print(f"  {contestant.name}: {outcome}", flush=True)
        running.append(one)
    for _ in range(turns):
        for one in running:
            one.play()
    for one in running:
        one.close()
    return results


def _family(pid: int) -> list[int]:
    """The process and all that descend from it."""
    parents: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents.setdefault(int(fields[1]), []).append(int(entry))
    found, waiting = [], [pid]
    while waiting:
        found.append(waiting.pop())
        waiting += parents.get(found[-1], [])
    return found


def _cpu_seconds(pid: int) -> float:
    total = 0
    for member in _family(pid):
        try:
            fields = Path(f"/proc/{member}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        total += sum(map(int, fields[11:15]))  # its own, and of children that have ended
    return total / _TICK


def _peak_memory(pid: int) -> int:
    total = 0
    for member in _family(pid):
        try:
            status = Path(f"/proc/{member}/status").read_text()
        except OSError:
            continue
        total += sum(
            int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM")
        )
    return total
