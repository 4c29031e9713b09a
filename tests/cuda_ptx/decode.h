// Converts statements to instructions: a function and the places of its operands in the registers of a warp.
//
// A register is an array of 32 lanes (a predicate is a mask of them); eight bytes before it is a mask of the lanes that
// have set it. Numbers, special registers and addresses of
// arrays are registers, too, filled when a warp starts, so that functions need not distinguish kinds of operands. The
// table of functions has the full text of each opcode, including qualifiers: any other opcode is refused, with its
// text.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "cuda_ptx/module.h"

namespace pymoe::ptx {

struct Warp;
struct Instruction;
using Function = void (*)(Warp&, const Instruction&, uint32_t lanes);

struct Instruction {
  enum Kind : uint8_t {
    kLanewise,       // each lane for itself
    kBranch,         // to `target`
    kIndexedBranch,  // to one of `targets`
    kExit,
    kWarp,           // the lanes that operand `mask` names, together
    kAlignedWarp,    // all lanes of the warp
    kBlock,          // bar.sync: all threads of the block
    kClusterArrive,  // barrier.cluster.arrive, which does not wait
    kClusterWait,
  } kind = kLanewise;
  bool negated = false;
  uint8_t results = 1;        // operands that are written
  uint8_t bytes = 0;          // of an element in memory
  uint8_t count = 1;          // elements of a vector in memory
  bool wide_address = false;  // the address is 64 bits wide
  bool is_signed = false;     // a value that is read into a wider register keeps its sign
  bool is_constant = false;   // a load through the read-only cache
  bool only_copied = false;   // values read from shared memory are only stored there again
  int32_t target = -1;
  uint32_t guard = 0;      // its place; 0: none
  uint32_t mask = 0;       // the place of the lanes' mask
  int64_t offset = 0;      // of an address
  uint32_t at[16] = {};    // places of the operands, results first
  uint8_t width[16] = {};  // of these
  Function run = nullptr;
  std::vector<uint32_t> reads, writes;  // places of registers, without the guard
  std::vector<int32_t> targets;
  const Statement* statement = nullptr;
};

enum class Special {
  kThread,
  kThreads,
  kBlock,
  kBlocks,
  kLane,
  kWarp,
  kLanesBelow,
  kLanesUpTo,
  kLanesAbove,
  kLanesFrom,
  kLaneBit,
  kRank,
  kRanks,
  kDynamicBytes
};

struct Program {
  Kernel kernel;
  std::vector<Instruction> code;
  uint32_t register_bytes = 0;  // of a warp
  struct Constant {
    uint32_t place;
    int width;
    uint64_t bits;
  };
  std::vector<Constant> constants;
  std::vector<uint32_t> registers;  // their places
  std::vector<std::pair<uint32_t, Special>> specials;
  int64_t static_shared = 0;  // bytes of static arrays
  int64_t dynamic_begin = 0;  // offset of the dynamic array
};

// Throws Error for an unknown instruction.
Program decode(Kernel kernel);

// What decoding an instruction may ask for.
class Decoder {
 public:
  Decoder(Program& program) : program_(program) {}

  // Returns the place of an operand: a register of `width` bytes (0: a predicate); a source may also be a number or
  // another constant.
  uint32_t result(const std::string& name, int width);
  uint32_t source(const std::string& name, int width);
  // Returns the place of a register of any width, and sets `width`.
  uint32_t any_result(const std::string& name, uint8_t& width);
  uint32_t any_source(const std::string& name, int width, uint8_t& found);
  // Returns the width of a register; -1 for any other operand.
  int width_of(const Operand& operand) const;
  // Moves the registers of the operands since the last call to the instruction.
  void take_registers(Instruction& to);
  // Writes base and offset of an address to `to`, the base as operand `number`.
  void address(const Operand& operand, Instruction& to, int number);
  int32_t label(const std::string& name) const;
  const Program& program() const { return program_; }

 private:
  uint32_t place(int width);
  uint32_t register_named(const std::string& name, uint8_t& width);
  bool is_register(const std::string& name) const { return program_.kernel.registers.contains(name); }

  Program& program_;
  std::unordered_map<std::string, uint32_t> places_;
  std::vector<uint32_t> reads_, writes_;
};

// Decodes one family of opcodes. Fills `to`, and returns whether it knows the opcode.
using Family = bool (*)(const Statement& statement, Decoder& decoder, Instruction& to);
bool decode_table(const Statement&, Decoder&, Instruction&);       // lanewise functions: table.h
bool decode_move(const Statement&, Decoder&, Instruction&);        // mov from and to vectors
bool decode_access(const Statement&, Decoder&, Instruction&);      // ld, st
bool decode_atomic(const Statement&, Decoder&, Instruction&);      // atom, red
bool decode_copy(const Statement&, Decoder&, Instruction&);        // cp.async
bool decode_control(const Statement&, Decoder&, Instruction&);     // branches, ends, barriers
bool decode_collective(const Statement&, Decoder&, Instruction&);  // shfl, vote, match, redux
bool decode_matrix(const Statement&, Decoder&, Instruction&);      // ldmatrix, mma

// "ld.global.v2.u32" -> {"ld", "global", "v2", "u32"}
std::vector<std::string> parts_of(const std::string& opcode);

}  // namespace pymoe::ptx
