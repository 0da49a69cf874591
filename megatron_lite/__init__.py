from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_lite.notebook import load as load


def __getattr__(name: str) -> object:
    """`megatron_lite.load`, loaded with torch and all when it is first asked for: the config has to stay light."""
    if name == "load":
        from megatron_lite.notebook import load

        return load
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
