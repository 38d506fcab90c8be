"""Plan in, result out: the device side of a step. The only package that knows both slots and tensors. Called by engine.py alone."""
