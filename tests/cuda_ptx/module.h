// The parsed text of a PTX module: kernels, their parameters and arrays, and statements with their operands. Nothing
// here knows what an instruction does; decode.h does.
#pragma once

#include <cstdint>
#include <map>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace pymoe::ptx {

// An error in the text, or in the program that it describes; the message quotes the place.
struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Operand {
  enum Kind { kPlain, kVector, kAddress } kind = kPlain;
  // A name or a number; the elements of {a, b}; base and offset ("0" if there is none) of [base + offset]. The pair
  // a|b is a plain operand of two items.
  std::vector<std::string> items;
};

struct Statement {
  int line = 0;
  std::string text;   // as it stands there, in one line
  std::string guard;  // the predicate of @p or @!p, or empty
  bool negated = false;
  std::string opcode;  // "ld.global.nc.v4.u32"
  std::vector<Operand> operands;
};

struct Array {
  int64_t alignment = 1, bytes = 0;
};

struct Parameter {
  std::string name;
  int64_t offset, bytes;
};

// Returns the bytes of a register of this type; 0 stands for a predicate.
int width_of_type(std::string_view type);

struct Kernel {
  std::string name;
  std::vector<Parameter> parameters;
  int64_t parameter_bytes = 0;
  int64_t most_threads = 1024;           // .maxntid or .reqntid
  std::map<std::string, int> registers;  // name -> width
  std::map<std::string, Array> shared;   // static arrays
  std::string dynamic_shared;            // the array whose size the launch gives, or empty
  std::vector<Statement> statements;
  std::map<std::string, int64_t> labels;                   // -> index of a statement
  std::map<std::string, std::vector<std::string>> tables;  // .branchtargets
};

// Returns the kernels of a module by name. Throws Error for text that cannot be parsed.
std::map<std::string, Kernel> parse_module(std::string_view text);

}  // namespace pymoe::ptx
