"""`fedbandit data`: import, generate and inspect data sets. A thin layer over `fedbandit.data`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from fedbandit.cli.help import Commands

app = Commands("Import, generate and inspect data sets.")
import_app = Commands("Import a data set into a folder.")


app.add_typer(import_app, name="import")


Out = Annotated[Path, typer.Option("--out", "-o", help="The folder to create; it must not exist yet.")]
TestFraction = Annotated[float, typer.Option(help="Share of examples to hold out if the source has no split.")]
Vocabulary = Annotated[int, typer.Option(help="Number of words to keep, the most frequent first.")]
Actions = Annotated[int, typer.Option(help="Number of tags that become actions, the most frequent first.")]
DropUnlabelled = Annotated[bool, typer.Option("--drop-unlabelled", help="Skip examples without any action.")]
Client = Annotated[str, typer.Option(help="The column with the client id.")]
Text = Annotated[list[str], typer.Option(help="A text column; repeatable.")]
FeatureColumns = Annotated[list[str], typer.Option(help="Feature columns: a,b,c or a pattern such as 'x_*'.")]
SplitColumn = Annotated[str | None, typer.Option(help="A column that says train or test.")]


@import_app.command()
def table(
    path: Annotated[Path, typer.Argument(help="A .csv, .tsv or .parquet file.")],
    out: Out,
    client: Client,
    labels: Annotated[str, typer.Option(help="The column with the label or labels.")],
    text: Text = [],  # noqa: B006 - typer's way to say "repeatable"
    features: FeatureColumns = [],  # noqa: B006
    label_separator: Annotated[str, typer.Option(help="The separator between labels in a cell.")] = "|",
    vocabulary: Vocabulary = 10_000,
    actions: Annotated[
        int | None,
        typer.Option(
            help="Number of labels that become actions, the most frequent first.",
            show_default="50 for text, otherwise all",
        ),
    ] = None,
    drop_unlabelled: DropUnlabelled = False,
    split: SplitColumn = None,
    test_fraction: TestFraction = 0.1,
) -> None:
    """A table with client ids, text or features, and labels."""
    from fedbandit.data.importers.table import TableOptions, import_table

    options = TableOptions(
        client=client,
        labels=labels,
        text=text,
        features=features,
        split=split,
        label_separator=label_separator,
        vocabulary=vocabulary,
        actions=actions,
        drop_unlabelled=drop_unlabelled,
        test_fraction=test_fraction,
    )
    _run(out, import_table, path, out, options)


@import_app.command()
def arrays(
    path: Annotated[Path, typer.Argument(help="A .npz file.")],
    out: Out,
    features: Annotated[str, typer.Option(help="The array of features or images, one row per example.")],
    labels: Annotated[str, typer.Option(help="The array of labels.")],
    clients: Annotated[str, typer.Option(help="The array of client ids.")],
    invert: Annotated[
        bool, typer.Option("--invert", help="Invert images: bright ink on dark becomes dark ink on bright.")
    ] = False,
    case_map: Annotated[
        bool | None,
        typer.Option(help="Whether the classes are 0-9, A-Z, a-z.", show_default="yes for 62 classes of 28x28 images"),
    ] = None,
    actions: Annotated[
        int | None, typer.Option(help="Number of classes.", show_default="the largest label plus one")
    ] = None,
    test_fraction: TestFraction = 0.1,
) -> None:
    """Arrays in a .npz file, for example images."""
    from fedbandit.data.importers.arrays import ArrayOptions, import_arrays

    options = ArrayOptions(
        features=features,
        labels=labels,
        clients=clients,
        invert=invert,
        case_map=case_map,
        actions=actions,
        test_fraction=test_fraction,
    )
    _run(out, import_arrays, path, out, options)


@import_app.command()
def emnist(
    out: Out,
    path: Annotated[
        Path | None, typer.Argument(help="The file emnist_all.sqlite(.lzma) or its folder; downloaded if missing.")
    ] = None,
    digits: Annotated[bool, typer.Option("--digits", help="Import the ten digits only.")] = False,
) -> None:
    """EMNIST by writer, from the published SQLite file."""
    from fedbandit.data.importers.images import import_emnist
    from fedbandit.data.importers.stackoverflow import find_database

    def importer(progress: Any) -> None:
        import_emnist(find_database(path, "emnist_all.sqlite", progress), out, digits, progress)

    _run(out, importer)


@import_app.command()
def stackoverflow(
    out: Out,
    path: Annotated[
        Path | None, typer.Argument(help="The file stackoverflow.sqlite(.lzma) or its folder; downloaded if missing.")
    ] = None,
    words: Annotated[
        Path | None, typer.Option(help="The published word_count file.", show_default="beside PATH")
    ] = None,
    tags: Annotated[Path | None, typer.Option(help="The published tag_count file.", show_default="beside PATH")] = None,
    vocabulary: Vocabulary = 10_000,
    actions: Actions = 50,
    drop_unlabelled: DropUnlabelled = False,
) -> None:
    """Stack Overflow by user, from the published SQLite file.

    The published word and tag counts decide which words and tags are kept.
    """
    from fedbandit.data.importers.stackoverflow import (
        StackOverflowOptions,
        find_counts,
        find_database,
        import_stackoverflow,
    )

    options = StackOverflowOptions(vocabulary=vocabulary, actions=actions, drop_unlabelled=drop_unlabelled)

    def importer(progress: Any) -> None:
        database = find_database(path, "stackoverflow.sqlite", progress)
        word_counts = find_counts(words, "stackoverflow.word_count", database, progress)
        tag_counts = find_counts(tags, "stackoverflow.tag_count", database, progress)
        import_stackoverflow(database, out, word_counts, tag_counts, options, progress)

    _run(out, importer)


@import_app.command()
def leaf(
    path: Annotated[Path, typer.Argument(help="The folder with train/*.json and test/*.json.")],
    out: Out,
    test_fraction: TestFraction = 0.1,
) -> None:
    """LEAF's FEMNIST, from its JSON files."""
    from fedbandit.data.importers.images import import_leaf

    _run(out, import_leaf, path, out, test_fraction)


@import_app.command()
def stackexchange(
    path: Annotated[Path, typer.Argument(help="A Posts.xml file or its folder.")],
    out: Out,
    vocabulary: Vocabulary = 10_000,
    actions: Actions = 50,
    drop_unlabelled: DropUnlabelled = False,
    test_fraction: TestFraction = 0.1,
) -> None:
    """A Stack Exchange site, from its public dump."""
    from fedbandit.data.importers.stackexchange import StackExchangeOptions, import_stackexchange

    options = StackExchangeOptions(
        vocabulary=vocabulary, actions=actions, drop_unlabelled=drop_unlabelled, test_fraction=test_fraction
    )
    _run(out, import_stackexchange, path, out, options)


@import_app.command()
def logged(
    path: Annotated[Path, typer.Argument(help="A .csv, .tsv or .parquet file.")],
    out: Out,
    client: Client,
    action: Annotated[str, typer.Option(help="The column with the action that was taken.")],
    reward: Annotated[str, typer.Option(help="The column with its reward.")],
    propensity: Annotated[str, typer.Option(help="The column with the probability of that action.")],
    text: Text = [],  # noqa: B006
    features: FeatureColumns = [],  # noqa: B006
    available: Annotated[str | None, typer.Option(help="The column with the available actions.")] = None,
    separator: Annotated[str, typer.Option(help="The separator between available actions in a cell.")] = "|",
    vocabulary: Vocabulary = 10_000,
    actions: Annotated[
        int | None,
        typer.Option(help="Number N of actions, which are named 0 to N-1.", show_default="the names in the file"),
    ] = None,
    test_fraction: Annotated[float, typer.Option(help="Share of clients to hold out for evaluation.")] = 0.1,
) -> None:
    """Logged bandit feedback: context, action, reward, propensity."""
    from fedbandit.data.importers.logged import LoggedOptions, import_logged

    options = LoggedOptions(
        client=client,
        action=action,
        reward=reward,
        propensity=propensity,
        text=text,
        features=features,
        available=available,
        separator=separator,
        vocabulary=vocabulary,
        actions=actions,
        test_fraction=test_fraction,
    )
    _run(out, import_logged, path, out, options)


@app.command()
def generate(
    name: Annotated[str, typer.Argument(help="The generator: topics (text) or glyphs (images).")],
    out: Out,
    clients: Annotated[
        int | None,
        typer.Option(min=1, help="Number of training clients.", show_default="2000 for topics, 500 for glyphs"),
    ] = None,
    like: Annotated[
        str | None,
        typer.Option(
            help="Sizes and skew of a published data set: stackoverflow for topics, emnist for glyphs.",
            show_default="as embedded",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="The random seed; the same seed gives the same bytes.")] = 0,
) -> None:
    """Make a synthetic population of any size.

    Memory stays bounded however many clients there are.
    """
    from importlib import import_module

    from fedbandit.core.errors import ConfigError
    from fedbandit.data import EMBEDDED

    if name not in EMBEDDED:
        raise ConfigError(f"{name}: no such generator; there are {' and '.join(EMBEDDED)}")
    options: dict[str, Any] = {"seed": seed, "like": like or name}
    if clients is not None:
        options["users" if name == "topics" else "writers"] = clients
    make = import_module(f"fedbandit.data.embedded.{name}").generate
    _run(out, lambda progress: make(out, **options, progress=progress))


@app.command()
def info(
    source: Annotated[str, typer.Argument(help="A data set folder, or the embedded glyphs or topics.")],
    picture: Annotated[
        Path | None,
        typer.Option(help="The contact sheet to write, for images.", show_default="NAME-contact-sheet.png"),
    ] = None,
) -> None:
    """Verify a data set and show what is in it.

    Draws a contact sheet where the contexts are images.
    """
    from fedbandit.data import open_dataset
    from fedbandit.data.info import describe, picture_name, verified, write_contact_sheet

    dataset = open_dataset(source, verify=True)
    target = picture_name(dataset, picture)
    typer.echo(describe(dataset))
    typer.echo(verified(dataset))
    if target is not None:
        typer.echo(f"contact sheet: {write_contact_sheet(dataset, target)}")


@app.command()
def statistics(
    source: Annotated[str, typer.Argument(help="A data set folder, or the embedded glyphs or topics.")],
    no_difficulty: Annotated[bool, typer.Option("--no-difficulty", help="Skip the supervised models.")] = False,
) -> None:
    """Measure sizes, skew, differences between clients, difficulty."""
    from fedbandit.data import open_dataset
    from fedbandit.data.embedded.statistics import describe

    for line in describe(open_dataset(source), difficulty=not no_difficulty):
        typer.echo(line)


def _run(out: Path, importer: Any, *arguments: Any) -> None:
    """Run an importer into a folder that appears only when complete, and print the result."""
    from fedbandit.core.progress import to_stderr
    from fedbandit.data.importers.common import importing
    from fedbandit.data.info import outcome

    try:
        with importing(out):
            importer(*arguments, progress=to_stderr())
    except KeyboardInterrupt:
        typer.echo("interrupted; nothing was written", err=True)
        raise typer.Exit(130) from None
    typer.echo(outcome(out))
    typer.echo(f"Inspect it: fedbandit data info {out}")
