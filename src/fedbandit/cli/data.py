"""`fedbandit data`: import, generate and inspect data sets. A thin layer over `fedbandit.data`."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from fedbandit.cli.help import Commands

app = Commands("Import, generate and inspect data sets.")
import_app = Commands("Import a data set into a folder.")


app.add_typer(import_app, name="import")


Out = Annotated[
    Path, typer.Option("--out", "-o", help="The folder to create; it must not exist yet.")
]
TestFraction = Annotated[
    float, typer.Option(help="Share of examples to hold out if the source has no split.")
]
Vocabulary = Annotated[int, typer.Option(help="Number of words to keep, the most frequent first.")]
Actions = Annotated[
    int, typer.Option(help="Number of tags that become actions, the most frequent first.")
]
DropUnlabelled = Annotated[
    bool, typer.Option("--drop-unlabelled", help="Skip examples without any action.")
]
Client = Annotated[str, typer.Option(help="The column with the client id.")]
Text = Annotated[
    list[str], typer.Option(help="A text column; repeatable. Other columns are then left out.")
]
FeatureColumns = Annotated[
    list[str],
    typer.Option(
        help="Columns of numbers: a,b,c or a pattern such as 'x_*'; alone they become a dense array."
    ),
]
SplitColumn = Annotated[str | None, typer.Option(help="A column that says train or test.")]
Treat = Annotated[
    list[str],
    typer.Option(
        "--as",
        metavar="COLUMN=KIND",
        help="Decide what a column is: text, number, log, raw, category, hashed, date, flag or ignore; repeatable.",
    ),
]
Categories = Annotated[
    int, typer.Option(help="Values of a category with a feature each; with more it is hashed.")
]
Scale = Annotated[str, typer.Option(help="How numbers are scaled: standard or none.")]
Dense = Annotated[
    bool | None,
    typer.Option(
        help="Whether contexts are a dense array.", show_default="if --features alone is given"
    ),
]
MissingWords = Annotated[
    list[str], typer.Option(help="A cell that means that the value is missing; repeatable.")
]
Encoding = Annotated[
    str | None, typer.Option(help="The encoding of a CSV file.", show_default="found in the file")
]
Delimiter = Annotated[
    str | None,
    typer.Option(help="The delimiter of a CSV file, or tab.", show_default="found in the file"),
]
Like = Annotated[
    str | None,
    typer.Option(
        help="A data set whose words, columns, scaling and actions are used.", metavar="DATASET"
    ),
]
OutUnlessDry = Annotated[
    Path | None, typer.Option("--out", "-o", help="The folder to create; it must not exist yet.")
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Show what would be made of the columns; write nothing.")
]


@import_app.command()
def table(
    path: Annotated[Path, typer.Argument(help="A .csv, .tsv or .parquet file.")],
    client: Client,
    labels: Annotated[
        list[str], typer.Option(help="The column with the label or labels; repeatable, or a,b,c.")
    ],
    out: OutUnlessDry = None,
    text: Text = [],  # noqa: B006 - typer's way to say "repeatable"
    features: FeatureColumns = [],  # noqa: B006
    treat: Treat = [],  # noqa: B006
    label_separator: Annotated[
        str | None,
        typer.Option(
            help="The separator between labels in a cell, or none.",
            show_default="found in the cells",
        ),
    ] = None,
    vocabulary: Vocabulary = 10_000,
    actions: Annotated[
        int | None,
        typer.Option(
            help="Number of labels that become actions, the most frequent first.",
            show_default="50 where there is text, otherwise all",
        ),
    ] = None,
    categories: Categories = 100,
    scale: Scale = "standard",
    dense: Dense = None,
    missing: MissingWords = [],  # noqa: B006
    drop_unlabelled: Annotated[
        bool,
        typer.Option("--drop-unlabelled/--keep-unlabelled", help="Skip rows without any action."),
    ] = True,
    split: SplitColumn = None,
    test_fraction: TestFraction = 0.1,
    encoding: Encoding = None,
    delimiter: Delimiter = None,
    like: Like = None,
    dry_run: DryRun = False,
) -> None:
    """A table with clients, columns of any kind, and labels.

    What each column is, is found in its cells and shown; --as decides otherwise.
    """
    from fedbandit.data.importers.table import TableOptions, import_table, preview_table

    options = TableOptions(
        client=client,
        labels=labels,
        text=text,
        features=features,
        treat=treat,
        split=split,
        label_separator=label_separator,
        vocabulary=vocabulary,
        actions=actions,
        categories=categories,
        scale=scale,
        dense=dense,
        missing=missing,
        drop_unlabelled=drop_unlabelled,
        test_fraction=test_fraction,
        encoding=encoding,
        delimiter=delimiter,
        like=like,
    )
    _run_or_preview(path, out, options, import_table, preview_table, dry_run)


@import_app.command()
def arrays(
    path: Annotated[Path, typer.Argument(help="A .npz file.")],
    out: Out,
    features: Annotated[
        str, typer.Option(help="The array of features or images, one row per example.")
    ],
    labels: Annotated[str, typer.Option(help="The array of labels.")],
    clients: Annotated[str, typer.Option(help="The array of client ids.")],
    invert: Annotated[
        bool,
        typer.Option(
            "--invert", help="Invert images: bright ink on dark becomes dark ink on bright."
        ),
    ] = False,
    case_map: Annotated[
        bool | None,
        typer.Option(
            help="Whether the classes are 0-9, A-Z, a-z.",
            show_default="yes for 62 classes of 28x28 images",
        ),
    ] = None,
    actions: Annotated[
        int | None,
        typer.Option(help="Number of classes.", show_default="the largest label plus one"),
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
        Path | None,
        typer.Argument(
            help="The file emnist_all.sqlite(.lzma) or its folder; downloaded if missing."
        ),
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
        Path | None,
        typer.Argument(
            help="The file stackoverflow.sqlite(.lzma) or its folder; downloaded if missing."
        ),
    ] = None,
    words: Annotated[
        Path | None, typer.Option(help="The published word_count file.", show_default="beside PATH")
    ] = None,
    tags: Annotated[
        Path | None, typer.Option(help="The published tag_count file.", show_default="beside PATH")
    ] = None,
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

    options = StackOverflowOptions(
        vocabulary=vocabulary, actions=actions, drop_unlabelled=drop_unlabelled
    )

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
        vocabulary=vocabulary,
        actions=actions,
        drop_unlabelled=drop_unlabelled,
        test_fraction=test_fraction,
    )
    _run(out, import_stackexchange, path, out, options)


@import_app.command()
def logged(
    path: Annotated[Path, typer.Argument(help="A .csv, .tsv or .parquet file.")],
    client: Client,
    action: Annotated[str, typer.Option(help="The column with the action that was taken.")],
    reward: Annotated[str, typer.Option(help="The column with its reward.")],
    propensity: Annotated[
        str, typer.Option(help="The column with the probability of that action.")
    ],
    out: OutUnlessDry = None,
    text: Text = [],  # noqa: B006
    features: FeatureColumns = [],  # noqa: B006
    treat: Treat = [],  # noqa: B006
    available: Annotated[
        str | None, typer.Option(help="The column with the available actions.")
    ] = None,
    separator: Annotated[
        str, typer.Option(help="The separator between available actions in a cell.")
    ] = "|",
    vocabulary: Vocabulary = 10_000,
    actions: Annotated[
        int | None,
        typer.Option(
            help="Number N of actions, which are named 0 to N-1.",
            show_default="the names in the file",
        ),
    ] = None,
    categories: Categories = 100,
    scale: Scale = "standard",
    dense: Dense = None,
    missing: MissingWords = [],  # noqa: B006
    test_fraction: TestFraction = 0.1,
    encoding: Encoding = None,
    delimiter: Delimiter = None,
    like: Like = None,
    dry_run: DryRun = False,
) -> None:
    """Logged bandit feedback: context, action, reward, propensity."""
    from fedbandit.data.importers.logged import LoggedOptions, import_logged, preview_logged

    options = LoggedOptions(
        client=client,
        action=action,
        reward=reward,
        propensity=propensity,
        text=text,
        features=features,
        treat=treat,
        available=available,
        separator=separator,
        vocabulary=vocabulary,
        actions=actions,
        categories=categories,
        scale=scale,
        dense=dense,
        missing=missing,
        test_fraction=test_fraction,
        encoding=encoding,
        delimiter=delimiter,
        like=like,
    )
    _run_or_preview(path, out, options, import_logged, preview_logged, dry_run)


@import_app.command()
def dsjson(
    path: Annotated[Path, typer.Argument(help="A file with one JSON object a line.")],
    client: Annotated[
        str, typer.Option(help="The feature that says whose decision it was, such as User.id.")
    ],
    out: OutUnlessDry = None,
    action_name: Annotated[
        str | None,
        typer.Option(
            help="The feature that names an action.",
            show_default="its tag, id or name, or all its features",
        ),
    ] = None,
    treat: Treat = [],  # noqa: B006
    vocabulary: Vocabulary = 10_000,
    categories: Categories = 100,
    scale: Scale = "standard",
    missing: MissingWords = [],  # noqa: B006
    test_fraction: TestFraction = 0.1,
    like: Like = None,
    dry_run: DryRun = False,
) -> None:
    """A log in Vowpal Wabbit's DSJSON."""
    from functools import partial

    from fedbandit.data.importers.contexts import ColumnOptions
    from fedbandit.data.importers.decisions import dsjson_options, import_dsjson, preview_dsjson

    columns = ColumnOptions(
        treat=treat,
        vocabulary=vocabulary,
        categories=categories,
        scale=scale,
        missing=missing,
        like=like,
    )
    options = dsjson_options(client, columns, test_fraction)
    importer, preview = (
        partial(one, action_name=action_name) for one in (import_dsjson, preview_dsjson)
    )
    _run_or_preview(path, out, options, importer, preview, dry_run)


@import_app.command()
def openbandit(
    path: Annotated[
        Path,
        typer.Argument(
            help="A campaign's CSV file in the Open Bandit Dataset's layout, or its folder."
        ),
    ],
    out: OutUnlessDry = None,
    client: Annotated[
        str | None,
        typer.Option(
            help="The column with the client id.", show_default="users with the same features"
        ),
    ] = None,
    treat: Treat = [],  # noqa: B006
    categories: Categories = 100,
    scale: Scale = "standard",
    test_fraction: TestFraction = 0.1,
    like: Like = None,
    dry_run: DryRun = False,
) -> None:
    """A log in the layout of the Open Bandit Dataset."""
    from fedbandit.data.importers.contexts import ColumnOptions
    from fedbandit.data.importers.decisions import (
        import_open_bandit,
        open_bandit_options,
        preview_open_bandit,
    )

    columns = ColumnOptions(treat=treat, categories=categories, scale=scale, like=like)
    options = open_bandit_options(path, columns, client, test_fraction)
    _run_or_preview(path, out, options, import_open_bandit, preview_open_bandit, dry_run)


class ExportLayout(StrEnum):
    """Layouts that a log can be exported to."""

    DSJSON = "dsjson"
    OPENBANDIT = "openbandit"


@app.command()
def export(
    source: Annotated[str, typer.Argument(help="A data set of logged decisions.")],
    to: Annotated[ExportLayout, typer.Option(help="The layout.")],
    out: Annotated[
        Path,
        typer.Option("--out", "-o", help="The file (dsjson) or folder (openbandit) to create."),
    ],
    split: Annotated[str, typer.Option(help="The part to export: train or test.")] = "train",
) -> None:
    """Write logged decisions in the layout of another tool."""
    from fedbandit.core.progress import to_stderr
    from fedbandit.data import open_dataset
    from fedbandit.data.export import export_dsjson, export_open_bandit

    exporter = export_dsjson if to is ExportLayout.DSJSON else export_open_bandit
    typer.echo(f"written: {exporter(open_dataset(source), out, split, to_stderr())}")


@app.command()
def generate(
    name: Annotated[str, typer.Argument(help="The generator: topics (text) or glyphs (images).")],
    out: Out,
    clients: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Number of training clients.",
            show_default="2000 for topics, 1000 for gallery, 500 for glyphs",
        ),
    ] = None,
    like: Annotated[
        str | None,
        typer.Option(
            help="Sizes and skew of a published data set: stackoverflow for topics, emnist for glyphs.",
            show_default="as embedded",
        ),
    ] = None,
    seed: Annotated[
        int, typer.Option(min=0, help="The random seed; the same seed gives the same bytes.")
    ] = 0,
) -> None:
    """Make a synthetic population of any size.

    Memory stays bounded however many clients there are.
    """
    from importlib import import_module
    from inspect import signature

    from fedbandit.core.errors import ConfigError
    from fedbandit.data import EMBEDDED

    if name not in EMBEDDED:
        raise ConfigError(f"{name}: no such generator; there are {', '.join(EMBEDDED)}")
    make = import_module(f"fedbandit.data.embedded.{name}").generate
    options: dict[str, Any] = {"seed": seed}
    if like is not None and "like" not in signature(make).parameters:
        raise ConfigError(f"--like: {name} stands for no published data set")
    if like is not None:
        options["like"] = like
    if clients is not None:
        options["writers" if name == "glyphs" else "users"] = clients
    _run(out, lambda progress: make(out, **options, progress=progress))


@app.command()
def info(
    source: Annotated[
        str, typer.Argument(help="A data set folder, or the embedded glyphs or topics.")
    ],
    picture: Annotated[
        Path | None,
        typer.Option(
            help="The contact sheet to write, for images.", show_default="NAME-contact-sheet.png"
        ),
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


@app.command("statistics")
def measure_statistics(
    source: Annotated[
        str, typer.Argument(help="A data set folder, or the embedded glyphs or topics.")
    ],
) -> None:
    """Measure sizes, skew and differences between clients."""
    from fedbandit.data import open_dataset
    from fedbandit.data.info import statistics

    for line in statistics(open_dataset(source)):
        typer.echo(line)


def _run_or_preview(
    path: Path, out: Path | None, options: Any, importer: Any, preview: Any, dry_run: bool
) -> None:
    """Import a table and show what was made of it, or only show that."""
    from fedbandit.core.errors import ConfigError
    from fedbandit.core.progress import to_stderr

    if dry_run:
        typer.echo(preview(path, options, progress=to_stderr()))
        return
    if out is None:
        raise ConfigError("out: name the folder to create (--out), or only look (--dry-run)")

    def importing(progress: Any) -> None:
        importer(path, out, options, progress=progress, say=typer.echo)

    _run(out, importing)


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
