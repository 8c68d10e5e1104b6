// Golden encodings: tokenizers/NAME.jsonl with one {"name", "text", "ids", "roundtrip", "decoded"}
// a line, and beside it NAME.decode.jsonl with {"name", "ids", "bytes_hex"}, ids cut anywhere.
#pragma once
#include <optional>
#include <string>
#include <vector>

#include "models/tokenizer.h"
#include "tools/verify_result.h"

namespace ebb::tools {

// The tokenizer whose files lie in FOLDER/NAME; nothing, and `why`, when they are not there or of
// a kind that this ebb does not read. Throws when they are damaged.
std::optional<Tokenizer> golden_tokenizer(const std::string& folder, const std::string& name,
                                          std::string* why);

// How many strings encode to other ids, decode to another text, or (token by token) to other bytes.
// Throws, naming file and line, when a line is not what it should be.
std::vector<VerifyResult> verify_tokenizer(const std::string& jsonl, const Tokenizer& tokenizer);

}  // namespace ebb::tools
