"""Work on several things, of which a user hears as it begins with each."""

import itertools
from collections.abc import Callable, Collection
from typing import TypeVar

from dcpjax.config import Progress

Item = TypeVar("Item")
Result = TypeVar("Result")


def told(
    progress: Progress | None,
    what: str,
    items: Collection[Item],
    function: Callable[[Item], Result],
) -> Callable[[Item], Result]:
    """``function`` for any of ``items``, in any order and from any thread.

    ``progress`` hears of each as "what item".
    """
    if progress is None:
        return function
    started = itertools.count(1)

    def call(item: Item) -> Result:
        progress(f"{what} {item}", next(started), len(items))
        return function(item)

    return call
