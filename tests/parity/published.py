"""The layouts that another project validated its convergence with, as cells of the parity matrix.

Tables A7 and A8 of "Heterogeneous Parallelism for Multimodal Large Language Model Training"
(Karnati et al.) name them for four GPUs to each module: on ranks of its own, :data:`A7` and
:data:`A8`. Its section C.4 runs those of A8 colocated, with both modules on the same eight ranks:
TP and PP as they are, DP doubled.
"""

from dataclasses import dataclass

from parity.cells import FULL, Cell

# TP/PP/DP of the decoder and of the encoder. The decoder is frozen in A7, and trains in A8.
_A8 = {
    "tp4_both": "4/1/1|4/1/1",
    "tp2_dp2_both": "2/1/2|2/1/2",
    "tp2_pp2_llm_tp4_vision": "2/2/1|4/1/1",
    "pp4_llm_tp4_vision": "1/4/1|4/1/1",
    "pp2_dp2_llm_tp2dp2_vis": "1/2/2|2/1/2",
    "tp2_pp2_llm_tp2_dp2_vis": "2/2/1|2/1/2",
    "pp4_llm_tp2dp2_vision": "1/4/1|2/1/2",
    "tp4_llm_tp2dp2_vision": "4/1/1|2/1/2",
}
A8 = tuple(_A8.values())
A7 = (
    *("4/1/1|4/1/1", "2/1/2|2/1/2", "2/2/1|4/1/1", "1/1/4|1/1/4", "1/4/1|4/1/1", "1/4/1|1/1/4"),
    *("1/2/2|2/1/2", "4/1/1|1/1/4", "2/2/1|2/1/2", "2/1/2|1/1/4"),
)


@dataclass(frozen=True, kw_only=True)
class PublishedLayout:
    """One row of the table, as it is run on eight shared ranks."""

    name: str
    tp: int
    pp: int
    dp: int
    encoder_tp: int
    encoder_dp: int  # its PP is 1 in every row

    def is_run_by(self, cell: Cell) -> bool:
        """Whether the cell, of any model and options, is this layout with its encoder apart."""
        own = (cell.encoder_tp, cell.tp, cell.pp, cell.dp)
        return (
            own == (self.encoder_tp, self.tp, self.pp, self.dp)
            and cell.mode == FULL
            and cell.vpp == 1
            and cell.ep == 1
        )


def _row(name: str, sizes: str) -> PublishedLayout:
    """A row with the sizes that the table has, for four GPUs each."""
    (tp, pp, dp), (encoder_tp, _, encoder_dp) = (
        map(int, module.split("/")) for module in sizes.split("|")
    )
    return PublishedLayout(
        name=name, tp=tp, pp=pp, dp=2 * dp, encoder_tp=encoder_tp, encoder_dp=2 * encoder_dp
    )


TABLE_A8 = tuple(_row(*each) for each in _A8.items())
