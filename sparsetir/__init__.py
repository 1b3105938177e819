import tvm.script
tvm.script.register_dialect("sparsetir", "sparsetir.script")
from . import op, ir, errors
