"""What the benchmarks print: the tables of their README."""

from harness.stages import registry


def table(titles, rows):
    """Return rows of texts as lines; all columns but the first are right-aligned."""
    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
    lines = []
    for row in (titles, *rows):
        first, *others = zip(row, widths, strict=True)
        cells = [first[0].ljust(first[1]), *(text.rjust(n) for text, n in others)]
        lines.append("  ".join(cells).rstrip())
    return lines


def rate(values):
    """Return a rate as two texts: the median, and the least and most."""
    return [f"{values['median']:,.0f}", f"{values['least']:,.0f}-{values['most']:,.0f}"]


def compared(values, others):
    """Return how many times as fast, or that the ranges of the two overlap."""
    if values["least"] <= others["most"] and others["least"] <= values["most"]:
        return "not distinguishable"
    return f"{values['median'] / others['median']:.2f}"


def versus(row):
    """Return the title of a column that compares with a row's stage, as "vs 01"."""
    return f"vs {registry()[row['stage'].split()[0]].number}"  # flags may follow


def stages_table(rows, speed):
    """Return a line for each stage; `speed` is the key of its images or tokens/s.

    It is compared with the first stage on as many processes, if that was trained.
    """
    first = rows[0]
    bases = {row["processes"]: row for row in rows if row["stage"] == first["stage"]}
    # {key: title and text}: not everything is measured in every run
    others = {
        "limit_images_per_s": (
            "of limit",
            lambda row, limit: f"{row[speed]['median'] / limit['median']:.2f}",
        ),
        "loading": ("loading", lambda _, part: f"{part['median']:.1%}"),
        "evaluation_s": ("evaluation s", lambda _, taken: f"{taken['median']:.3f}"),
        "gpu_bytes": ("GPU MiB", lambda _, peak: f"{peak / 2**20:.0f}"),
    }
    others = {key: column for key, column in others.items() if key in first}
    titles = ["stage", "processes", "precision", speed.replace("_per_", "/")]
    titles += ["least-most", versus(first), *(title for title, _ in others.values())]
    lines = []
    for row in rows:
        base = bases.get(row["processes"], first)
        cells = [row["stage"], str(row["processes"]), row["precision"]]
        cells += rate(row[speed])
        cells += ["" if row is base else compared(row[speed], base[speed])]
        for key, (_, text) in others.items():
            cells += [text(row, row[key]) if key in row else ""]
        lines.append(cells)
    return table(titles, lines)


def show(result):
    """Return the table of a result, as the text that the command prints."""
    machine, rows = result["machine"], result["stages"]
    device = " and ".join(machine["gpus"]) or f"{machine['cores']} cores"
    speed = "images_per_s" if "images_per_s" in rows[0] else "tokens_per_s"
    windows = int(result["work"]["epochs"]) - 1
    lines = [
        f"{machine['cpu']}, {device}; torch {machine['torch']}",
        result["title"],
        f"medians of {windows} epochs (least-most)",
        "",
        *stages_table(rows, speed),
    ]
    return "\n".join(lines)
