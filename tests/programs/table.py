"""Ten whole programs as people of nine projects write them; each is a function of a `Size`."""

from tests.programs import flax_programs, module_programs, plain_programs

PROGRAMS = {
    "nanodo": flax_programs.nanodo,
    "masked_lm": flax_programs.masked_lm,
    "resnet": flax_programs.resnet,
    "vit": flax_programs.vit,
    "equinox": module_programs.equinox,
    "haiku": module_programs.haiku,
    **plain_programs.PROGRAMS,
}
