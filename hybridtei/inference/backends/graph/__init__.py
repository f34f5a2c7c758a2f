"""Model families as ONNX graphs, and the runtimes that run them on a CPU: ONNX Runtime and
OpenVINO."""
