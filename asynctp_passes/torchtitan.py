"""asynctp in torchtitan: an override, which its command line names.

torchtitan ... --compile.enable --override.imports asynctp_passes.torchtitan.asynctp
torchtitan ... --override.imports 'asynctp_passes.torchtitan.asynctp={"strict": "all"}'

torchtitan applies overrides before it compiles anything. This one changes none of its configuration. The name of
torchtitan's backend stays `inductor`, which FlexAttention asks for.
"""

from __future__ import annotations

from typing import Any

from torchtitan.components.metrics import MetricsProcessor
from torchtitan.config.override import override

from asynctp_passes.config import Config
from asynctp_passes.process import enable


# each trainer has one configuration of metrics
@override(  # type: ignore[untyped-decorator]
    target=MetricsProcessor.Config, description="asynctp in all that Inductor compiles"
)
def asynctp(config: Any, **options: Any) -> Any:
    """Enable asynctp in this process.

    Args:
        config: A part of torchtitan's configuration, which stays as it is.
        **options: Fields of `Config`.

    Raises:
        ConfigError: An option is unknown or has a bad value.
    """
    enable(Config.from_options(options))
    return config
