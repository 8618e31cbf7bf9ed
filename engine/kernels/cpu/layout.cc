// The tables of layout.h as text, for Python to compare: the name of a table in brackets, and a line for each row.

#include "layout.h"

#define OPERAND(type, name) "operand " #type " " #name "\n"
#define RESULT(type, name) "result " #type " " #name "\n"
#define UPDATE(type, name) "update " #type " " #name "\n"
#define ATTRIBUTE(type, name) "attribute " #type " " #name "\n"
#define CACHE(type, name) "cache " #type " " #name "\n"
#define GROUP(type, name) "group " #type " " #name "\n"
#define NUMBER(type, name) "number " #type " " #name "\n"
#define CHOICE(enumerator, name) "choice " #name "\n"

#define TITLE(name) "[" #name "]\n"
#define KERNEL(name) TITLE(name) PENSTOCK_TABLE_##name(OPERAND, RESULT, UPDATE, ATTRIBUTE)
#define HALF(name) TITLE(name) PENSTOCK_TABLE_##name(OPERAND, CACHE, GROUP)

extern "C" const char* PenstockLayout() {
  return PENSTOCK_KERNELS(KERNEL)
      PENSTOCK_HALVES(HALF)
      TITLE(Linear) PENSTOCK_TABLE_Linear(OPERAND)
      TITLE(States) PENSTOCK_TABLE_States(OPERAND)
      TITLE(HalfIntegers) PENSTOCK_HALF_INTEGERS(NUMBER)
      TITLE(HalfFloats) PENSTOCK_HALF_FLOATS(NUMBER)
      TITLE(Gate) PENSTOCK_GATES(CHOICE)
      TITLE(Offset) PENSTOCK_OFFSETS(CHOICE);
}
