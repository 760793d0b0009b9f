"""What the tests share; every module here runs on any platform.

cases           shapes written as test ids, and the arrays made from them
by_hand         attention in Python loops over NumPy numbers, to judge the reference
plain           dense attention as anyone would write it in JAX: the yardstick of the accuracy rule
programs        the functions of an attention that are compared: outputs, gradients, tangents
accuracy        the accuracy rule (R20): the one place where a tolerance is computed
gpu_compile     a GPU compiler without a GPU, and what it says
compile_report  prints that at the end of the compile lane
structure       what a traced or compiled program consists of: primitives, shapes, memory
"""
