"""Write the planner's validation page.

python -m scripts.validation
"""

from pathlib import Path

from dcpjax.planner.validation import render
from dcpjax.planner.validation_kernels import all_chapters

PAGE = Path(__file__).resolve().parent.parent / "dcpjax" / "planner" / "VALIDATION.md"


if __name__ == "__main__":
    PAGE.write_text(render(all_chapters()), encoding="utf-8")
