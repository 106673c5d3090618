"""`fedbandit data`: import, generate and inspect data sets. A thin layer over `fedbandit.data`."""

from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

import fedbandit
from fedbandit.cli.help import Commands
from fedbandit.core.errors import ConfigError
from fedbandit.core.progress import to_stderr

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


class CsvNames(StrEnum):
    """Whether the first row of a CSV file has the names of its columns."""

    YES = "yes"
    NO = "no"


CsvHeader = Annotated[
    CsvNames | None,
    typer.Option(help="Whether a CSV file's first row has names.", show_default="if it looks so"),
]
Like = Annotated[
    str | None,
    typer.Option(
        help="A data set whose words, columns, scaling and actions are used.", metavar="DATASET"
    ),
]
Where = Annotated[str | None, typer.Option(help="Keep the rows that fit, such as 'rating>=4'.")]
ItemFile = Annotated[
    Path | None, typer.Option("--items", help="A table of items with features to choose from.")
]
ItemColumn = Annotated[
    str | None,
    typer.Option(
        "--item", help="The column with the item's id; EVENTS=ITEMS where the names differ."
    ),
]
CandidateColumn = Annotated[
    str | None, typer.Option("--candidates", help="The column with the items that were shown.")
]
TimeColumn = Annotated[str | None, typer.Option("--time", help="The column that says when.")]
ItemTime = Annotated[
    str | None,
    typer.Option(help="The items' column that says from when a row holds; the newest counts."),
]
ItemTreat = Annotated[
    list[str],
    typer.Option("--item-as", metavar="COLUMN=KIND", help="As --as, for columns of items."),
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
        list[str],
        typer.Option(
            help="The column with the label or labels; repeatable, or a,b,c.",
            show_default="the item",
        ),
    ] = [],  # noqa: B006 - typer's way to say "repeatable"
    out: OutUnlessDry = None,
    items: ItemFile = None,
    item: ItemColumn = None,
    candidates: CandidateColumn = None,
    negatives: Annotated[
        str | None,
        typer.Option(
            help="Items sampled by popularity beside the label, or all.", show_default="all"
        ),
    ] = None,
    time: TimeColumn = None,
    item_time: ItemTime = None,
    item_treat: ItemTreat = [],  # noqa: B006
    where: Where = None,
    text: Text = [],  # noqa: B006
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
    header: CsvHeader = None,
    like: Like = None,
    dry_run: DryRun = False,
) -> None:
    """A table with clients, columns of any kind, and labels.

    What each column is, is found in its cells and shown; --as decides otherwise. With --items the
    label is an item of a catalogue with features, chosen among candidates.
    """
    from fedbandit.data.importers.tables import TableOptions

    reading: dict[str, Any] = {
        "vocabulary": vocabulary,
        "categories": categories,
        "scale": scale,
        "missing": missing,
        "like": like,
    }
    chosen = _item_options(
        items, item, candidates, negatives, time, item_time, reading | {"treat": item_treat}
    )
    options = TableOptions(
        client=client,
        labels=labels or ([item.partition("=")[0]] if item else []),
        items=chosen,
        where=where,
        text=text,
        features=features,
        treat=treat,
        split=split,
        label_separator=label_separator,
        actions=actions,
        dense=dense,
        drop_unlabelled=drop_unlabelled,
        test_fraction=test_fraction,
        encoding=encoding,
        delimiter=delimiter,
        header=None if header is None else header is CsvNames.YES,
        **reading,
    )
    _import_rows(lambda: (path, options), out, dry_run)


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
    from fedbandit.data.importers.published import find_database

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
    from fedbandit.data.importers.published import find_counts, find_database
    from fedbandit.data.importers.stackexchange import StackOverflowOptions, import_stackoverflow

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
        str | None, typer.Option(help="The column with the probability of that action.")
    ] = None,
    estimate_propensities: Annotated[
        bool,
        typer.Option(
            "--estimate-propensities",
            help="Estimate the probabilities from the log, each half of the clients from the other.",
        ),
    ] = False,
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
    items: ItemFile = None,
    item: ItemColumn = None,
    candidates: CandidateColumn = None,
    time: TimeColumn = None,
    item_time: ItemTime = None,
    item_treat: ItemTreat = [],  # noqa: B006
    where: Where = None,
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
    header: CsvHeader = None,
    like: Like = None,
    dry_run: DryRun = False,
) -> None:
    """Logged bandit feedback: context, action, reward, propensity."""
    from fedbandit.data.importers.tables import LoggedOptions

    if estimate_propensities == (propensity is not None):
        raise ConfigError("propensity: name its column, or --estimate-propensities; one of the two")
    reading: dict[str, Any] = {
        "vocabulary": vocabulary,
        "categories": categories,
        "scale": scale,
        "missing": missing,
        "like": like,
    }
    chosen = _item_options(
        items, item or action, candidates, None, time, item_time, reading | {"treat": item_treat}
    )
    options = LoggedOptions(
        client=client,
        items=chosen,
        where=where,
        action=action,
        reward=reward,
        propensity=propensity,
        text=text,
        features=features,
        treat=treat,
        available=available,
        separator=separator,
        actions=actions,
        dense=dense,
        test_fraction=test_fraction,
        encoding=encoding,
        delimiter=delimiter,
        header=None if header is None else header is CsvNames.YES,
        **reading,
    )
    _import_rows(lambda: (path, options), out, dry_run, estimate_propensities)


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
    fixed_actions: Annotated[
        bool, typer.Option("--fixed-actions", help="Leave out the features of actions.")
    ] = False,
    treat: Treat = [],  # noqa: B006
    vocabulary: Vocabulary = 10_000,
    categories: Categories = 100,
    scale: Scale = "standard",
    missing: MissingWords = [],  # noqa: B006
    test_fraction: TestFraction = 0.1,
    like: Like = None,
    dry_run: DryRun = False,
) -> None:
    """A log in Vowpal Wabbit's DSJSON.

    Actions with features become the items of a catalogue, and each decision keeps its candidates.
    """
    from fedbandit.data.importers.contexts import ColumnOptions
    from fedbandit.data.importers.logs import DsJson, dsjson_options

    columns = ColumnOptions(
        treat=treat,
        vocabulary=vocabulary,
        categories=categories,
        scale=scale,
        missing=missing,
        like=like,
    )

    def reader() -> tuple[Any, Any]:
        source = DsJson(path, action_name, fixed_actions)
        return source, dsjson_options(client, columns, test_fraction, source)

    _import_rows(reader, out, dry_run)


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
    item_features: Annotated[
        bool,
        typer.Option("--item-features", help="Take items with the features in item_context.csv."),
    ] = False,
    treat: Treat = [],  # noqa: B006
    categories: Categories = 100,
    scale: Scale = "standard",
    test_fraction: TestFraction = 0.1,
    like: Like = None,
    dry_run: DryRun = False,
) -> None:
    """A log in the layout of the Open Bandit Dataset."""
    from fedbandit.data.importers.contexts import ColumnOptions
    from fedbandit.data.importers.logs import OpenBandit, open_bandit_options

    columns = ColumnOptions(treat=treat, categories=categories, scale=scale, like=like)

    def reader() -> tuple[Any, Any]:
        options = open_bandit_options(path, columns, client, test_fraction, item_features)
        return OpenBandit(path, item_features), options

    _import_rows(reader, out, dry_run)


@app.command("append-items")
def append(
    source: Annotated[Path, typer.Argument(help="A data set with a catalogue.")],
    items: Annotated[Path, typer.Argument(help="A table of items, new ones or known ones.")],
    item: Annotated[str, typer.Option(help="The column with the item's id.")],
    out: Out,
    item_time: ItemTime = None,
) -> None:
    """Add items to a data set, or newer features of known ones."""
    from fedbandit.data.importers.items import append_items

    dataset = fedbandit.open_dataset(source)
    _run(out, lambda progress: append_items(dataset, out, items, item, item_time, progress))


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
    from fedbandit.data.export import export_dsjson, export_open_bandit

    exporter = export_dsjson if to is ExportLayout.DSJSON else export_open_bandit
    typer.echo(f"written: {exporter(fedbandit.open_dataset(source), out, split, to_stderr())}")


@app.command()
def generate(
    name: Annotated[
        str, typer.Argument(help="The generator: topics, glyphs, gallery or catalogue.")
    ],
    out: Out,
    clients: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Number of training clients.",
            show_default="2000 for topics, 1500 for catalogue, 1000 for gallery, 500 for glyphs",
        ),
    ] = None,
    items: Annotated[
        int | None,
        typer.Option(min=8, help="Number of items of a catalogue.", show_default="2000"),
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

    from fedbandit.data import EMBEDDED

    if name not in EMBEDDED:
        raise ConfigError(f"{name}: no such generator; there are {', '.join(EMBEDDED)}")
    make = import_module(f"fedbandit.data.embedded.{name}").generate
    options: dict[str, Any] = {"seed": seed}
    for option, value in (("like", like), ("items", items)):
        if value is not None and option not in signature(make).parameters:
            raise ConfigError(f"--{option}: not an option of {name}")
        options |= {} if value is None else {option: value}
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
    from fedbandit.data.info import describe, picture_name, verified, write_contact_sheet

    dataset = fedbandit.open_dataset(source, verify=True)
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
    from fedbandit.data.info import statistics

    for line in statistics(fedbandit.open_dataset(source)):
        typer.echo(line)


def _item_options(
    items: Any,
    item: str | None,
    candidates: str | None,
    negatives: str | None,
    time: str | None,
    item_time: str | None,
    reading: dict[str, Any],
) -> Any:
    """The options of a catalogue as one object; None without one."""
    from fedbandit.data.importers.contexts import ColumnOptions
    from fedbandit.data.importers.items import ItemOptions

    if items is None:
        for name, given in (("candidates", candidates), ("negatives", negatives), ("time", time)):
            if given is not None:
                raise ConfigError(f"{name}: is about items; name their table (--items)")
        return None
    if item is None:
        raise ConfigError("item: name the column with the item's id")
    return ItemOptions(
        table=items,
        column=item.partition("=")[2] or item,
        candidates=candidates,
        negatives=int(negatives) if negatives and negatives.isdigit() else negatives,
        time=time,
        item_time=item_time,
        columns=ColumnOptions(**reading),
    )


def _import_rows(
    reader: Callable[[], tuple[Any, Any]], out: Path | None, dry_run: bool, estimate: bool = False
) -> None:
    """Import the rows of a source and show what was made of the columns, or only show that.

    `reader` opens the source, which may take long, and returns it with its options.
    """
    from fedbandit.data.importers.tables import import_table, preview_table

    if dry_run:
        typer.echo(preview_table(*reader(), progress=to_stderr()))
        return
    if out is None:
        raise ConfigError("out: name the folder to create (--out), or only look (--dry-run)")

    def into(folder: Path, progress: Any) -> Path:
        source, options = reader()
        return import_table(source, folder, options, progress, typer.echo)

    if estimate:
        _run(out, lambda progress: _estimated(lambda folder: into(folder, progress), out))
    else:
        _run(out, lambda progress: into(out, progress))


def _estimated(importer: Callable[[Path], Path], out: Path) -> Path:
    """Import a log without propensities, estimate them, and write that down."""
    from tempfile import TemporaryDirectory

    from fedbandit.data import FederatedDataset
    from fedbandit.data.writer import rewrite
    from fedbandit.evaluation.logs import log_of, with_estimated_propensities

    with TemporaryDirectory() as folder:
        log = FederatedDataset.open(importer(Path(folder) / out.name))
        splits = {"train": log.train} | ({} if log.test is None else {"test": log.test})
        found = {
            name: log_of(with_estimated_propensities(split, log.header.places)).propensities
            for name, split in splits.items()
        }
        return rewrite(log, out, propensities=found, source={"propensities": "estimated"})


def _run(out: Path, importer: Any, *arguments: Any) -> None:
    """Run an importer into a folder that appears only when complete, and print the result."""
    from fedbandit.data.importers import importing
    from fedbandit.data.info import outcome

    try:
        with importing(out):
            importer(*arguments, progress=to_stderr())
    except KeyboardInterrupt:
        typer.echo("interrupted; nothing was written", err=True)
        raise typer.Exit(130) from None
    typer.echo(outcome(out))
    typer.echo(f"Inspect it: fedbandit data info {out}")
