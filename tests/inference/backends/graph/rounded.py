"""A stand-in for OpenVINO's hint for bfloat16, for processors without it: every number that a graph
computes is rounded.

OpenVINO rounds the outputs of nearly all operators of floating numbers, and keeps whole numbers,
truths, constants and inputs; here all operators are rounded, so a graph that keeps its precision
here keeps it there.
"""

import numpy as np
import openvino as ov


class Rounded(ov.Op):
    """Rounds float32 to bfloat16, to the nearest, ties to even."""

    def __init__(self, inputs):
        super().__init__(self, inputs)

    def validate_and_infer_types(self):
        self.set_output_type(0, self.get_input_element_type(0), self.get_input_partial_shape(0))

    def clone_with_new_inputs(self, new_inputs):
        return Rounded(new_inputs)

    def evaluate(self, outputs, inputs):
        outputs[0].shape = inputs[0].shape
        outputs[0].data[...] = to_bfloat16(inputs[0].data)
        return True

    def has_evaluate(self):
        return True


def to_bfloat16(values):
    """The nearest numbers of bfloat16, as float32."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    odd = (bits >> 16) & 1
    return ((bits + 0x7FFF + odd) & np.uint32(0xFFFF0000)).view(np.float32)


def round_all(model):
    """Round every float32 that the model computes from its inputs, not what it computes from
    constants alone."""
    varies = set()
    for node in model.get_ordered_ops():
        name = node.get_friendly_name()
        sources = {value.get_node().get_friendly_name() for value in node.input_values()}
        if node.get_type_name() == "Parameter" or varies & sources:
            varies.add(name)
            for output in node.outputs():
                if output.get_element_type() == ov.Type.f32 and sources:
                    _round(output)


def _round(output):
    readers = [
        reader
        for reader in output.get_target_inputs()
        if reader.get_node().get_type_name() != "Result"
    ]
    rounded = Rounded([output]).output(0)
    for reader in readers:
        reader.replace_source_output(rounded)
