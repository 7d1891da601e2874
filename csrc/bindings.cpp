// The Python face of the native kernels: integers in, nothing kept. One line per operation.
#include <nanobind/nanobind.h>

NB_MODULE(_native, m) { m.doc() = "Native CPU kernels of bifolio"; }
