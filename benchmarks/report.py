"""The tables and the picture of what benchmarks/compare.py measured."""

import matplotlib.pyplot as plt

from tools.stages import first_with
from tools.stages import registry


def table(titles, rows):
    """Return rows of texts as lines; all columns but the first are right-aligned."""
    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
    lines = []
    for row in (titles, *rows):
        first, *others = zip(row, widths, strict=True)
        cells = [
            first[0].ljust(first[1]),
            *(text.rjust(width) for text, width in others),
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def rate(values):
    """Return images per second as two texts: the median, and the least and most."""
    return f"{values['median']:,.0f}", f"{values['least']:,.0f}-{values['most']:,.0f}"


def ratio(values, digits=2):
    """Return a ratio as text: the median, and the least and most in parentheses."""
    median, least, most = (
        f"{values[name]:.{digits}f}" for name in ("median", "least", "most")
    )
    return f"{median} ({least}-{most})"


def compared(values, others):
    """Return how many times as fast, or that the ranges of the two overlap."""
    if values["least"] <= others["most"] and others["least"] <= values["most"]:
        return "not distinguishable"
    return f"{values['median'] / others['median']:.2f}"


def versus(row):
    """Return the title of a column that compares with a row's stage, as "vs 01"."""
    stage, *_ = row["stage"].split()  # flags may follow
    return f"vs {registry()[stage].number}"


def communication(row):
    """Return the part of a DDP step's time that is communication, as text."""
    if "communication" not in row:
        return "none"
    part = row["communication"]
    if part["least"] <= 0:
        return "not distinguishable"
    return f"{part['median']:.0%} ({part['least']:.0%}-{part['most']:.0%})"


def stages_table(result):
    first = result["stages"][0]
    device = result["work"]["device"]
    gpus = any(counted["gpu_bytes"] for counted in result["counted"].values())
    titles = ["stage", "processes", "device", "precision", "images/s", "least-most"]
    titles += ["of limit", "in step", versus(first), "loading", "evaluation s"]
    titles += ["GPU MiB" if gpus else "MiB"]
    rows = []
    for row in result["stages"]:
        counted = result["counted"][row["stage"]]
        memory = counted["gpu_bytes"] if gpus else row["bytes"]["most"]
        cells = [row["stage"], str(row["processes"]), device, row["precision"]]
        cells += [*rate(row["images_per_s"]), ratio(row["of_limit"])]
        in_step = row.get("of_limit_in_step")  # of several processes
        cells += [ratio(in_step) if in_step else ""]
        cells += [
            "" if row is first else compared(row["images_per_s"], first["images_per_s"])
        ]
        cells += [f"{row['loading']['median']:.1%}"]
        cells += [f"{row['evaluation_s']['median']:.3f}", f"{memory / 2**20:.0f}"]
        rows.append(cells)
    return table(titles, rows)


def scaling_table(result):
    titles = ["processes", "global batch", "images/s", "least-most", "of limit"]
    titles += ["communication"]
    rows = []
    for row in sorted(
        result["scaling"], key=lambda row: (row["batch_size"], row["processes"])
    ):
        cells = [str(row["processes"]), str(row["batch_size"])]
        cells += [*rate(row["images_per_s"]), ratio(row["of_limit"])]
        rows.append([*cells, communication(row)])
    return table(titles, rows)


def libraries_table(result):
    """Return the rates with other libraries, beside that of the stage they repeat."""
    processes = result["libraries"][0]["processes"]
    stage = next(row for row in result["stages"] if row["processes"] == processes)
    ours = stage["between_steps"]
    rows = [[stage["stage"], str(processes), *rate(ours), ""]]
    for row in result["libraries"]:
        cells = [row["program"], str(processes), *rate(row["images_per_s"])]
        rows.append([*cells, compared(row["images_per_s"], ours)])
    titles = ["program", "processes", "images/s", "least-most", versus(stage)]
    return table(titles, rows)


def counted_table(result):
    titles = ["stage", "waits per step", "collectives per step", "bytes per step"]
    rows = []
    for stage, counted in result["counted"].items():
        seen = counted["per_step"]
        calls = ", ".join(f"{seen[name]['calls']:g} {name}" for name in seen)
        size = sum(sums["bytes"] for sums in seen.values())
        waits = f"{counted['waits_per_step']:g}"
        rows.append([stage, waits, calls or "none", f"{size:,.0f}"])
    return table(titles, rows)


def evaluation_line(result):
    """Compare the first stage with a sharded evaluation with the one that it changes.

    Returns a list of one line, or of none if they were not both measured.
    """
    after = registry()[first_with("exact_eval")]
    before = registry()[after.builds_on]
    seconds = {row["stage"]: row["evaluation_s"]["median"] for row in result["stages"]}
    if not {before.name, after.name} <= seconds.keys():
        return []
    faster = seconds[before.name] / seconds[after.name]
    return [
        f"The evaluation of stage {after.number} is {faster:.2f} times as fast as that"
        f" of stage {before.number}.",
    ]


def show(result):
    """Return the tables of a result, as the text that the command prints."""
    machine, work = result["machine"], result["work"]
    device = " and ".join(machine["gpus"]) or f"{machine['cores']} cores"
    windows = int(work["rounds"]) * (int(work["epochs"]) - 1)
    lines = [
        f"{machine['cpu']}, {device}; torch {machine['torch']}",
        f"{work['arch']}, images of {work['image_size']} px, global"
        f" batch {work['batch_size']}; medians of {windows} epochs (least-most)",
        "",
        *stages_table(result),
        "",
        "of limit: each epoch's images/s divided by those of the mean of two windows of"
        " nothing but",
        "forward, backward and step, just before and just after it, by the same"
        " processes;",
        "in step: the same, by processes that wait for each other once a step.",
        *evaluation_line(result),
    ]
    if result["scaling"]:
        lines += [
            "",
            f"Scaling of {result['scaling'][0]['stage']}:",
            *scaling_table(result),
        ]
    if result["libraries"]:
        lines += [
            "",
            "The same training with other libraries, from an epoch's first step to its"
            " last:",
            *libraries_table(result),
        ]
    lines += [
        "",
        "What a process waits for and sends, per optimizer step:",
        *counted_table(result),
        "DataParallel copies without collectives, and on a CPU it splits nothing.",
    ]
    return "\n".join(lines)


def medians(result):
    """Return the numbers that the picture shows, as text; it is stored in the file."""
    pairs = [(row["stage"], row["images_per_s"]["median"]) for row in result["stages"]]
    return ", ".join(f"{stage} {median:.0f} images/s" for stage, median in pairs)


def draw(result, path):
    """Draw the images/s of the stages as bars, with their spread, against the limit."""
    rows = result["stages"]
    figure, axis = plt.subplots(figsize=(9, 4))
    middle = [row["images_per_s"]["median"] for row in rows]
    low = [row["images_per_s"]["median"] - row["images_per_s"]["least"] for row in rows]
    high = [row["images_per_s"]["most"] - row["images_per_s"]["median"] for row in rows]
    names = [row["stage"].replace("_", " ") for row in rows]
    axis.barh(
        names, middle, xerr=[low, high], color="tab:blue", ecolor="0.3", capsize=3
    )
    for place, row in enumerate(rows):
        limit = row["limit_images_per_s"]["median"]
        mark = {"color": "tab:red"}
        if place == 0:
            mark["label"] = "the limit: nothing but the steps"
        axis.plot([limit, limit], [place - 0.4, place + 0.4], **mark)
    axis.invert_yaxis()
    axis.set(
        xlabel="images/s in training (bars: median, lines: from least to most)",
        xlim=(0, None),
    )
    axis.legend(loc="lower right", bbox_to_anchor=(1, 1), frameon=False)
    stored = {"Software": None, "Description": medians(result)}
    figure.savefig(
        path, dpi=110, bbox_inches="tight", facecolor="white", metadata=stored
    )
