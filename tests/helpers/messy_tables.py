"""Tables as people have them: a shop's clicks, a support desk's tickets, and a log of decisions in DSJSON."""

import json
import random
from datetime import datetime, timedelta
from pathlib import Path

ITEMS = {
    "Gärten": "hose rake spade",
    "Küche": "pan knife bowl",
    "Büro": "desk lamp pen",
    "玩具": "kite doll 球",
}
QUEUES = {
    "billing": "invoice refund charge",
    "login": "password locked account",
    "shipping": "parcel late courier",
}


def write_clicks(path: Path, rows: int = 600) -> Path:
    """A shop's clicks in UTF-8 with a mark: gaps, unicode, an index, a price in words, a constant, an id per row."""
    rng = random.Random(1)
    lines = [",visitor,search,price,device,member,seen_at,shop,session,clicked"]
    for row in range(rows):
        item = rng.choice(list(ITEMS))
        words = ITEMS[item].split()
        search = f'"{rng.choice(words)}, {rng.choice(words)} {rng.choice(["cheap", "blue"])}"'
        price = (
            rng.choice(["", "n/a", *[f"{rng.lognormvariate(3, 1.5):.2f}"] * 8])
            if row != 40
            else "ask us"
        )
        device = rng.choice(["phone", "tablet", "laptop", ""])
        seen = datetime(2024, 5, 1) + timedelta(minutes=rng.randrange(40_000))
        clicked = item if rng.random() > 0.03 else ""
        visitor = f"v{rng.randrange(60):02d}" if row != 7 else ""
        member = rng.choice(["yes", "no"])
        cells = [
            row,
            visitor,
            search,
            price,
            device,
            member,
            f"{seen:%Y-%m-%d %H:%M}",
            "main",
            f"s{row:06x}",
            clicked,
        ]
        lines.append(",".join(str(cell) for cell in cells))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8-sig")
    return path


def write_tickets(path: Path, rows: int = 600, seed: int = 2) -> Path:
    """A support desk's export: semicolons, Latin-1, decimal commas, German dates, two columns of labels."""
    rng = random.Random(seed)
    lines = ["Nr;Kunde;Betreff;Priorität;erstellt;Minuten;Filiale;Queue;Queue 2"]
    for row in range(rows):
        queue = rng.choice(list(QUEUES))
        subject = f'"{rng.choice(QUEUES[queue].split())} {rng.choice(QUEUES[queue].split())} für {rng.choice("AB")}"'
        created = datetime(2023, 3, 1) + timedelta(hours=rng.randrange(9000))
        minutes = "-" if rng.random() < 0.1 else f"{rng.uniform(1, 90):.1f}".replace(".", ",")
        other = rng.choice([*QUEUES, "", "", ""])
        cells = [
            row + 1,
            f"K{rng.randrange(60):03d}",
            subject,
            rng.choice(["hoch", "niedrig", ""]),
            f"{created:%d.%m.%Y %H:%M}",
            minutes,
            f"0{rng.randrange(4)}",
            queue if row % 50 else "",
            other,
        ]
        lines.append(";".join(str(cell) for cell in cells))
    path.write_text("\n".join(lines) + "\n", encoding="latin-1")
    return path


def write_decisions(path: Path, rows: int = 600) -> Path:
    """A uniform policy's log as Vowpal Wabbit's services write it; two lines cannot be learned from."""
    rng = random.Random(3)
    best = {"engineering": "sports", "arts": "music", "law": "news"}
    lines = []
    for row in range(rows):
        major, age, hour = (
            rng.choice(list(best)),
            rng.randrange(18, 60),
            rng.choice(["morning", "evening"]),
        )
        topics = rng.sample(["sports", "music", "news", "food"], 3)
        ranked = rng.sample([1, 2, 3], 3)
        reward = float(topics[ranked[0] - 1] == best[major] and rng.random() < 0.8)
        event = {
            "_label_cost": -reward,
            "_label_probability": 1 / 3,
            "_label_Action": ranked[0],
            "_labelIndex": ranked[0] - 1,
            "Timestamp": f"2024-02-{1 + row % 28:02d}T{row % 24:02d}:15:00.000Z",
            "Version": "1",
            "EventId": f"e{row:05d}",
            "a": ranked,
            "p": [1 / 3] * 3,
            "c": {
                "User": {"id": f"u{rng.randrange(40)}", "major": major, "age": age},
                "Context": {"hour": hour},
                "_multi": [{"Action": {"topic": topic}} for topic in topics],
            },
            "VWState": {"m": "m/1"},
        }
        if row == 5:
            event["_skipLearn"] = True
        lines.append(json.dumps(event))
    lines.insert(
        9, json.dumps({"RewardValue": 1.0, "EnqueuedTimeUtc": "2024-02-01", "EventId": "e00001"})
    )
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path
