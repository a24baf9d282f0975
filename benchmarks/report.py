"""The tables and the picture of what benchmarks/compare.py has measured."""

import matplotlib.pyplot as plt


def table(titles, rows):
    """Return rows of texts as lines, the first column left-aligned, the others right-aligned."""
    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
    lines = []
    for row in (titles, *rows):
        first, *others = zip(row, widths, strict=True)
        cells = [first[0].ljust(first[1]), *(text.rjust(width) for text, width in others)]
        lines.append("  ".join(cells).rstrip())
    return lines


def rate(values):
    """Return images per second as text: the median, and from where to where the windows went."""
    return f"{values['median']:,.0f}", f"{values['least']:,.0f}-{values['most']:,.0f}"


def the_limit(result, row):
    """Return the row of `limits` that belongs to the row of a stage."""
    wanted = [row[name] for name in ("processes", "batch_size", "precision")]
    for limit in result["limits"]:
        if [limit[name] for name in ("processes", "batch_size", "precision")] == wanted:
            return limit
    raise LookupError(f"no limit was measured for {wanted}")


def of_limit(result, row):
    """Return how much of its limit a stage reaches."""
    return row["images_per_s"]["median"] / the_limit(result, row)["bare"]["median"]


def communication(limit):
    """Return as text which share of the time of a step with DDP goes into communication."""
    return f"{limit['communication']['median']:.1%}" if "communication" in limit else "none"


def stages_table(result):
    first = result["stages"][0]
    gpus = any(counted["gpu_bytes"] for counted in result["counted"].values())
    titles = ["stage", "processes", "device", "precision", "images/s", "least-most", "s/epoch"]
    titles += ["GPU MiB" if gpus else "MiB", "vs 01", "of limit", "loading", "evaluation s"]
    rows = []
    for row in result["stages"]:
        memory = result["counted"][row["stage"]]["gpu_bytes"] if gpus else row["bytes"]["most"]
        rows.append([
            row["stage"], str(row["processes"]), result["work"]["device"], row["precision"],
            *rate(row["images_per_s"]), f"{row['epoch_s']['median']:.2f}", f"{memory / 2**20:.0f}",
            f"{row['images_per_s']['median'] / first['images_per_s']['median']:.2f}",
            f"{of_limit(result, row):.2f}", f"{row['loading']['median']:.1%}",
            f"{row['evaluation_s']['median']:.3f}",
        ])  # fmt: skip
    for limit in result["limits"]:
        if limit["batch_size"] == first["batch_size"]:
            rows.append([
                "the limit", str(limit["processes"]), result["work"]["device"],
                limit["precision"], *rate(limit["bare"]), "", "",
                f"{limit['bare']['median'] / first['images_per_s']['median']:.2f}", "", "", "",
            ])  # fmt: skip
    return table(titles, rows)


def scaling_table(result):
    titles = ["processes", "global batch", "images/s", "least-most", "limit", "of limit"]
    titles += ["communication"]
    rows = []
    for row in result["scaling"]:
        limit = the_limit(result, row)
        rows.append([
            str(row["processes"]), str(row["batch_size"]), *rate(row["images_per_s"]),
            rate(limit["bare"])[0], f"{of_limit(result, row):.2f}", communication(limit),
        ])  # fmt: skip
    return table(titles, rows)


def counted_table(result):
    titles = ["stage", "collectives per step", "bytes per step"]
    rows = []
    for stage, counted in result["counted"].items():
        seen = counted["per_step"]
        calls = ", ".join(f"{seen[name]['calls']:g} {name}" for name in seen)
        size = sum(sums["bytes"] for sums in seen.values())
        rows.append([stage, calls or "none", f"{size:,.0f}"])
    return table(titles, rows)


def evaluation_line(result):
    """Compare the two ways of evaluating, where both were measured."""
    seconds = {row["stage"][:2]: row["evaluation_s"]["median"] for row in result["stages"]}
    if not {"06", "07"} <= seconds.keys():
        return []
    faster = seconds["06"] / seconds["07"]
    return ["", f"The evaluation of stage 07 is {faster:.2f} times as fast as that of stage 06."]


def show(result):
    """Return the tables of a result, as the text that the command prints."""
    machine, work = result["machine"], result["work"]
    device = " and ".join(machine["gpus"]) or f"{machine['cores']} cores"
    windows = int(work["rounds"]) * (int(work["epochs"]) - 1)
    lines = [
        f"{machine['cpu']}, {device}; torch {machine['torch']}",
        f"{work['arch']}, {work['images']} images of {work['image_size']} px, global batch "
        f"{work['batch_size']}; medians of {windows} epochs",
        "",
        *stages_table(result),
        *evaluation_line(result),
    ]
    if result["scaling"]:
        lines += ["", f"Scaling of {result['scaling'][0]['stage']}:", *scaling_table(result)]
    lines += ["", "What a process sends, per optimizer step:", *counted_table(result)]
    return "\n".join(lines)


def medians(result):
    """Return the figures that the picture shows, as text; it is stored in the file."""
    pairs = [(row["stage"], row["images_per_s"]["median"]) for row in result["stages"]]
    return ", ".join(f"{stage} {median:.0f} images/s" for stage, median in pairs)


def draw(result, path):
    """Draw the images/s of the stages as bars, with their spread, against the limit."""
    rows = result["stages"]
    figure, axis = plt.subplots(figsize=(9, 4))
    middle = [row["images_per_s"]["median"] for row in rows]
    low = [row["images_per_s"]["median"] - row["images_per_s"]["least"] for row in rows]
    high = [row["images_per_s"]["most"] - row["images_per_s"]["median"] for row in rows]
    names = [f"{row['stage'][:2]} {row['stage'][3:].replace('_', ' ')}" for row in rows]
    axis.barh(names, middle, xerr=[low, high], color="tab:blue", ecolor="0.3", capsize=3)
    for place, row in enumerate(rows):
        limit = the_limit(result, row)["bare"]["median"]
        axis.plot([limit, limit], [place - 0.4, place + 0.4], color="tab:red",
                  label="the limit: nothing but the steps" if place == 0 else None)  # fmt: skip
    axis.invert_yaxis()
    axis.set(
        xlabel="images/s in training (bars: median, lines: from least to most)", xlim=(0, None)
    )
    axis.legend(loc="lower right", bbox_to_anchor=(1, 1), frameon=False)
    stored = {"Software": None, "Description": medians(result)}
    figure.savefig(path, dpi=110, bbox_inches="tight", facecolor="white", metadata=stored)
