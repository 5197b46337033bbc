"""Train the tiny GLM that the project ships, or go on with a run that was interrupted.

    python -m scripts.train_tiny_glm --folder RUN [--scale 8] [--seed 0]

Writes checkpoints and a log into the folder, and the finished model with what it can do into
RUN/export. ``--scale`` multiplies the number of steps: 1 takes an hour of one core, 8 a night. The
last line of stdout is JSON.
"""

import argparse
import json
from pathlib import Path

from scripts.tiny_glm.config import GlmConfig
from scripts.tiny_glm.evaluate import evaluate
from scripts.tiny_glm.export import export, load, write_json
from scripts.tiny_glm.stages import plan, smoke_plan
from scripts.tiny_glm.training import Report, Run, append_json, train

SMOKE_CONFIG = GlmConfig(
    hidden_size=32,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    index_topk=4,
    index_topk_freq=2,
    index_skip_topk_offset=1,
)
EVALUATED_ROWS, SMOKE_ROWS = 64, 4


def main() -> None:
    options = _parse()
    config = SMOKE_CONFIG if options.smoke else GlmConfig()
    stages = smoke_plan() if options.smoke else plan(options.scale)
    run = Run(config, stages, options.seed, options.folder)
    params = train(run, _both(append_json(run.log_path), _print))
    folder = options.folder / "export"
    export(folder, config, params)
    # What is loaded again is rounded to the types of the file: that is what the numbers are about.
    rows = SMOKE_ROWS if options.smoke else EVALUATED_ROWS
    results = evaluate(load(folder, config), config, rows)
    write_json(folder / "evaluation.json", results)
    _print(results)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train the tiny GLM, or go on training.")
    parser.add_argument("--folder", type=Path, required=True, help="checkpoints, log and export")
    parser.add_argument("--scale", type=float, default=1.0, help="times the planned steps")
    parser.add_argument("--seed", type=int, default=0, help="of weights and data")
    parser.add_argument("--smoke", action="store_true", help="a minute, for a model of no use")
    return parser.parse_args()


def _both(first: Report, second: Report) -> Report:
    def report(line: dict[str, object]) -> None:
        first(line)
        second(line)

    return report


def _print(line: dict[str, object]) -> None:
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
