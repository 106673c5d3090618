"""The numpy forms of `fedbandit.core.loops` by their names, to compare with the compiled ones."""

from fedbandit.core import loops

globals().update(
    {name: loop.numpy for name, loop in vars(loops).items() if isinstance(loop, loops.Loop)}
)
