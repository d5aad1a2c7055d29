# SPDX-License-Identifier: Apache-2.0
"""What measurements of layers launch beside the kernels' references; to be run with TRITON_INTERPRET=1."""

from __future__ import annotations

import torch
from interpreting import with_bfloat16, with_numbers, with_rounding

from benchmarks import int8_linear
from nexfort_engine.kernels.quantize_rows import op as quantize_rows
from nexfort_engine.kernels.scaled_linear import choice, launch
from nexfort_engine.kernels.scaled_linear import op as scaled_linear
from nexfort_engine.quant import tune

with_numbers()
with_bfloat16()
with_rounding()
FORM = choice.Form(32, 32, 64, 4, 1)
ROWS = 70

for layer in (int8_linear.Layer(512, 48), int8_linear.Layer(256, 64, up=True)):
    values = int8_linear.given(layer, ROWS, "cpu")
    rows = launch.rows_in_int8(values.x[None], "", int8_linear.GROUP)
    wanted = quantize_rows.quantized(values.x, int8_linear.GROUP)
    assert torch.allclose(rows[1], wanted[1], rtol=1e-4) and (rows[0].int() - wanted[0].int()).abs().max() <= 1
    found = int8_linear.ours(layer, values, rows, FORM)(0)
    far = int8_linear.distance(found, int8_linear.truth_of(layer, values))
    assert far < 0.05, (layer, far)
    gate, residual = torch.randn(1, layer.columns).bfloat16(), torch.randn(ROWS, layer.columns).bfloat16()
    first, second = values.weights[:2]
    more = {"gate": gate, "residual": residual, "activation": "gelu_tanh"}
    given = [None, second[0], second[1], None, gate, residual, "gelu_tanh", [ROWS], torch.bfloat16]
    plain = scaled_linear.reference(*rows, *first, *given)
    found = launch.product(*rows, *first, FORM, torch.bfloat16, up=second, **more)
    assert (found.double() - plain.double()).norm() <= 0.01 * plain.double().norm()

x = torch.randn(2, 3, 512).bfloat16()
factor, shift = torch.randn(2, 1, 1024).bfloat16().chunk(2, -1)
found = launch.rows_in_int8(x, "layer_norm", 256, factor, shift)
wanted = quantize_rows.reference(x, None, None, None, factor, shift, "layer_norm", 1e-6, True, 256)
assert torch.allclose(found[1], wanted[1], rtol=4e-3) and (found[0].int() - wanted[0].int()).abs().max() <= 2

# of forms that compute a layer the fastest is kept, with what its input took; one that is wrong is not
times = iter((5.0, 40.0, 30.0, 90.0))
wrong = choice.Form(32, 64, 64, 4, 1)
right = tune.ours
tune.microseconds = lambda run, least=0.0: (next(times), "pretended")
tune.forms_of = lambda layer: (FORM, wrong, choice.Form(16, 32, 64, 4, 1))
tune.ours = lambda layer, values, rows, form: (
    (lambda number: 1.5 * right(layer, values, rows, FORM)(number))
    if form is wrong
    else right(layer, values, rows, form)
)
tune.host = lambda layer, values: right(layer, values, launch.rows_in_int8(values.x[None], "", 256), FORM)
found = tune.measured(tune.Layer(256, 48), ROWS, "cpu")
assert found == choice.Measured(choice.Form(16, 32, 64, 4, 1), 35.0, 90.0), found
