"""Files in the published layouts, made with a real protobuf encoder, real SQLite and real LZMA."""

import json
import lzma
import sqlite3
from pathlib import Path

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_LABELS = descriptor_pb2.FieldDescriptorProto


def _example_class():
    """`tf.train.Example` built from its schema at run time."""
    file = descriptor_pb2.FileDescriptorProto(
        name="example.proto", package="tensorflow", syntax="proto3"
    )

    def message(name, *fields, parent=file):
        made = parent.message_type.add() if parent is file else parent.nested_type.add()
        made.name = name
        for number, (field, label, kind, type_name) in enumerate(fields, start=1):
            made.field.add(name=field, number=number, label=label, type=kind, type_name=type_name)
        return made

    one, many = _LABELS.LABEL_OPTIONAL, _LABELS.LABEL_REPEATED
    message("BytesList", ("value", many, _LABELS.TYPE_BYTES, None))
    message("FloatList", ("value", many, _LABELS.TYPE_FLOAT, None))
    message("Int64List", ("value", many, _LABELS.TYPE_INT64, None))
    feature = message(
        "Feature",
        ("bytes_list", one, _LABELS.TYPE_MESSAGE, ".tensorflow.BytesList"),
        ("float_list", one, _LABELS.TYPE_MESSAGE, ".tensorflow.FloatList"),
        ("int64_list", one, _LABELS.TYPE_MESSAGE, ".tensorflow.Int64List"),
    )
    feature.oneof_decl.add(name="kind")
    for field in feature.field:
        field.oneof_index = 0
    features = message(
        "Features", ("feature", many, _LABELS.TYPE_MESSAGE, ".tensorflow.Features.FeatureEntry")
    )
    entry = message(
        "FeatureEntry",
        ("key", one, _LABELS.TYPE_STRING, None),
        ("value", one, _LABELS.TYPE_MESSAGE, ".tensorflow.Feature"),
        parent=features,
    )
    entry.options.map_entry = True
    message("Example", ("features", one, _LABELS.TYPE_MESSAGE, ".tensorflow.Features"))
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("tensorflow.Example"))


Example = _example_class()


def encode(**features) -> bytes:
    """A serialized Example; a list of bytes, floats or whole numbers for each feature."""
    example = Example()
    for name, values in features.items():
        feature = example.features.feature[name]
        if not values:
            feature.SetInParent()
        elif isinstance(values[0], bytes):
            feature.bytes_list.value.extend(values)
        elif isinstance(values[0], float):
            feature.float_list.value.extend(values)
        else:
            feature.int64_list.value.extend(values)
    return example.SerializeToString()


def write_sqlite(path: Path, rows, metadata=None) -> Path:
    """`rows` of (split, client, proto); the metadata counts them unless given."""
    counts: dict[tuple[str, str], int] = {}
    for split, client, _ in rows:
        counts[client, split] = counts.get((client, split), 0) + 1
    if metadata is None:
        metadata = [(client, split, number) for (client, split), number in counts.items()]
    database = sqlite3.connect(path)
    with database:
        database.execute(
            "CREATE TABLE examples (split_name TEXT, client_id TEXT, serialized_example_proto BLOB)"
        )
        database.execute(
            "CREATE TABLE client_metadata (client_id TEXT, split_name TEXT, num_examples INTEGER)"
        )
        database.execute("CREATE INDEX by_client ON examples (split_name, client_id)")
        database.executemany("INSERT INTO examples VALUES (?, ?, ?)", rows)
        database.executemany("INSERT INTO client_metadata VALUES (?, ?, ?)", metadata)
    database.close()
    return path


def pack(path: Path) -> Path:
    """The `.lzma` of a file, in the old container that the published files use."""
    packed = path.with_name(f"{path.name}.lzma")
    packed.write_bytes(lzma.compress(path.read_bytes(), format=lzma.FORMAT_ALONE))
    return packed


def image(client: int, number: int) -> list[float]:
    """784 multiples of 1/255, different for every image; mostly background."""
    pixels = [1.0] * 784
    for k in range(20):
        pixels[(client * 37 + number * 11 + k * 29) % 784] = (
            (client + number + k * 12) % 256
        ) / 255
    return pixels


def emnist_rows(clients: int = 3, images: int = 4):
    rows = []
    for client in range(clients):
        for number in range(images):
            label = (client * images + number * 7) % 62
            split = "all_test" if number == images - 1 else "all_train"
            proto = encode(pixels=image(client, number), label=[label])
            rows.append((split, f"f{client:04d}_0{client}", proto))
            digits = encode(pixels=image(client, number), label=[label % 10])
            rows.append((split.replace("all", "digits_only"), f"f{client:04d}_0{client}", digits))
    return rows


def sentence(tokens: str, title: str, tags: str) -> bytes:
    return encode(
        tokens=[tokens.encode()],
        title=[title.encode()],
        tags=[tags.encode()],
        creation_date=[b"2010-01-01 00:00:00.0 UTC"],
        score=[-3],
        type=[b"question"],
    )


def write_counts(folder: Path, words: dict[str, int], tags: dict[str, int]) -> tuple[Path, Path]:
    word_file, tag_file = folder / "stackoverflow.word_count", folder / "stackoverflow.tag_count"
    word_file.write_text("".join(f"{word} {count}\n" for word, count in words.items()))
    tag_file.write_text(json.dumps(tags))
    return word_file, tag_file
