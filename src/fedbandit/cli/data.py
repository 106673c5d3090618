"""`fedbandit data`: import data sets into the on-disk format and look at them. A thin skin over `fedbandit.data`."""

from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(help="Import data sets and look at them.", no_args_is_help=True)
import_app = typer.Typer(help="Make a data set folder from a source.", no_args_is_help=True)


app.add_typer(import_app, name="import")


Out = Annotated[Path, typer.Option("--out", "-o", help="The folder to make; it may not exist yet.")]
TestFraction = Annotated[float, typer.Option(help="How much to hold out where the source has no split.")]
Vocabulary = Annotated[int, typer.Option(help="How many of the most frequent words to keep.")]
Actions = Annotated[int, typer.Option(help="How many of the most frequent tags become actions.")]
DropUnlabelled = Annotated[bool, typer.Option("--drop-unlabelled", help="Leave out examples without any action.")]
Client = Annotated[str, typer.Option(help="The column with the client's id.")]
Text = Annotated[list[str], typer.Option(help="A column of text; may be repeated.")]
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
    label_separator: Annotated[str, typer.Option(help="What stands between labels in a cell.")] = "|",
    vocabulary: Vocabulary = 10_000,
    actions: Annotated[
        int | None, typer.Option(help="How many of the most frequent labels become actions [text: 50, else all].")
    ] = None,
    drop_unlabelled: DropUnlabelled = False,
    split: SplitColumn = None,
    test_fraction: TestFraction = 0.1,
) -> None:
    """Any table: client id, text or features, labels."""
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
    invert: Annotated[bool, typer.Option("--invert", help="Turn bright ink on dark into dark ink on bright.")] = False,
    case_map: Annotated[
        bool | None, typer.Option(help="Whether the classes are 0-9, A-Z, a-z [62 classes of 28x28 images: yes].")
    ] = None,
    actions: Annotated[
        int | None, typer.Option(help="How many classes there are [the largest label plus one].")
    ] = None,
    test_fraction: TestFraction = 0.1,
) -> None:
    """Arrays in a .npz file, images for example."""
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
        Path | None, typer.Argument(help="emnist_all.sqlite(.lzma) or its folder; downloaded where missing.")
    ] = None,
    digits: Annotated[bool, typer.Option("--digits", help="Only the ten digits.")] = False,
) -> None:
    """EMNIST by writer, from the published SQLite file."""
    from fedbandit.data.importers.images import import_emnist
    from fedbandit.data.importers.published import find_database

    def importer(progress: Any) -> None:
        import_emnist(find_database(path, "emnist_all.sqlite", progress), out, digits, progress)

    _run(out, importer)


@import_app.command()
def stackoverflow(
    out: Out,
    path: Annotated[
        Path | None, typer.Argument(help="stackoverflow.sqlite(.lzma) or its folder; downloaded where missing.")
    ] = None,
    words: Annotated[Path | None, typer.Option(help="The published word_count file [found beside PATH].")] = None,
    tags: Annotated[Path | None, typer.Option(help="The published tag_count file [found beside PATH].")] = None,
    vocabulary: Vocabulary = 10_000,
    actions: Actions = 50,
    drop_unlabelled: DropUnlabelled = False,
) -> None:
    """Stack Overflow by user, from the published SQLite file and its word and tag counts."""
    from fedbandit.data.importers.published import find_counts, find_database
    from fedbandit.data.importers.stackoverflow import StackOverflowOptions, import_stackoverflow

    options = StackOverflowOptions(vocabulary=vocabulary, actions=actions, drop_unlabelled=drop_unlabelled)

    def importer(progress: Any) -> None:
        database = find_database(path, "stackoverflow.sqlite", progress)
        word_counts = find_counts(words, "stackoverflow.word_count", database, progress)
        tag_counts = find_counts(tags, "stackoverflow.tag_count", database, progress)
        import_stackoverflow(database, out, word_counts, tag_counts, options, progress)

    _run(out, importer)


@import_app.command()
def leaf(
    path: Annotated[Path, typer.Argument(help="The folder that holds train/*.json and test/*.json.")],
    out: Out,
    test_fraction: TestFraction = 0.1,
) -> None:
    """LEAF's FEMNIST, from its JSON files."""
    from fedbandit.data.importers.leaf import import_leaf

    _run(out, import_leaf, path, out, test_fraction)


@import_app.command()
def stackexchange(
    path: Annotated[Path, typer.Argument(help="A Posts.xml, or the folder that holds it.")],
    out: Out,
    vocabulary: Vocabulary = 10_000,
    actions: Actions = 50,
    drop_unlabelled: DropUnlabelled = False,
    test_fraction: TestFraction = 0.1,
) -> None:
    """Any Stack Exchange site, from its public dump."""
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
    propensity: Annotated[str, typer.Option(help="The column with the probability with which it was taken.")],
    text: Text = [],  # noqa: B006
    features: FeatureColumns = [],  # noqa: B006
    available: Annotated[str | None, typer.Option(help="A column with the actions that could be taken.")] = None,
    separator: Annotated[str, typer.Option(help="What stands between available actions in a cell.")] = "|",
    vocabulary: Vocabulary = 10_000,
    actions: Annotated[int | None, typer.Option(help="Actions are 0..N-1 [the names that occur].")] = None,
    test_fraction: TestFraction = 0.0,
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
def info(
    source: Annotated[str, typer.Argument(help="A data set folder, or glyphs or topics.")],
    picture: Annotated[
        Path | None,
        typer.Option(help="Where the contact sheet of images goes [NAME-contact-sheet.png]."),
    ] = None,
) -> None:
    """What is in a data set; for images also a contact sheet."""
    from fedbandit.data import open_dataset
    from fedbandit.data.info import describe, picture_name, write_contact_sheet

    dataset = open_dataset(source)
    target = picture_name(dataset, picture)
    typer.echo(describe(dataset))
    if target is not None:
        typer.echo(f"contact sheet: {write_contact_sheet(dataset, target)}")


@app.command()
def statistics(
    source: Annotated[str, typer.Argument(help="A data set folder, or glyphs or topics.")],
    no_difficulty: Annotated[bool, typer.Option("--no-difficulty", help="Leave out the supervised models.")] = False,
) -> None:
    """How a data set looks in numbers: sizes, skew, how much clients differ, how hard it is to learn centrally."""
    from fedbandit.data import open_dataset
    from fedbandit.data.embedded.statistics import describe

    for line in describe(open_dataset(source), difficulty=not no_difficulty):
        typer.echo(line)


def _run(out: Path, importer: Any, *arguments: Any) -> None:
    """Run an importer under guard and say what came of it."""
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
    typer.echo(f"Look at it: fedbandit data info {out}")
