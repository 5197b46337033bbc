"""Write the table of settings that can be combined into dcpjax/README.md.

python -m scripts.composition_table
"""

from pathlib import Path

from tests.composition.table import with_table

PAGE = Path(__file__).resolve().parent.parent / "dcpjax" / "README.md"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
