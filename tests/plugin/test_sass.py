"""The reader of NVIDIA machine code finds what disturbs a product under way."""

import pytest

pytest.importorskip("triton")

from tests.plugin import sass

LOOP = """
        /*0000*/                   LDSM.16.M88.4 R28, [R3+UR6] ;          /* 0x0 */
        /*0010*/                   WARPGROUP.ARRIVE ;                     /* 0x0 */
        /*0020*/                   IGMMA.64x8x32.S8.S8 R24, R28, gdesc[UR8], RZ, !UPT, gsb0 ; /* 0x0 */
        {during}
        /*0040*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;        /* 0x0 */
        /*0050*/                   LOP3.LUT R28, R25, 0xf, RZ, 0xc0, !PT ; /* 0x0 */
        /*0060*/              @!P0 BRA 0x0 ;                              /* 0x0 */
        /*0070*/                   EXIT ;                                 /* 0x0 */
"""


@pytest.mark.parametrize(
    ("during", "disturbs"),
    [
        ("/*0030*/ FADD R40, R41, R42 ;", False),
        ("/*0030*/ LDSM.16.M88.4 R32, [R3+UR6] ;", False),
        ("/*0030*/ LDSM.16.M88.4 R26, [R3+UR6] ;", True),
        ("/*0030*/ LDS.64 R30, [R3] ;", True),
        ("/*0030*/ @P1 LOP3.LUT R31, R4, 0xf0f0f0f, RZ, 0xc0, !PT ;", True),
        ("/*0030*/ I2FP.F32.S32 R40, R27 ;", True),
        ("/*0030*/ STS [R3], R24 ;", True),
        ("/*0030*/ STS [R28], R40 ;", False),
        ("/*0030*/ @P1 BRA 0x0 ;", True),
    ],
)
def test_registers_of_a_product_are_left_alone_until_it_is_waited_for(during: str, disturbs: bool) -> None:
    code = sass.parse(LOOP.format(during=during))
    assert len(code) == 8
    assert bool(sass.disturbed(code)) == disturbs
