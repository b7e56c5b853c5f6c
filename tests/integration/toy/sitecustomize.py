"""Puts two toy features on the list before a job starts, as a release would ship real ones."""

from training_xpu.features import Feature, register

register(
    Feature(
        name="toy",
        variable="TRAINING_XPU_TOY",
        meaning="Watches training.",
        since="0.1.0",
        available="toy_feature:available",
        seams={
            "step": "toy_feature:on_step",
            "root-forward": "toy_feature:on_root_forward",
            "compile": "toy_feature:on_compile",
        },
    )
)
register(
    Feature(
        name="toy-launcher",
        variable="TRAINING_XPU_TOY_LAUNCHER",
        meaning="Sets a variable for the ranks.",
        since="0.1.0",
        available="toy_feature:available",
        start="toy_feature:set_for_ranks",
        roles=frozenset({"launcher"}),
    )
)
