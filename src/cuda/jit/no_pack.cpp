// The pack of a library that was built without one; see pack.hpp.
#include <cstddef>

namespace tessera::cuda {

extern const unsigned char embedded_pack[];
extern const std::size_t embedded_pack_size;
const unsigned char embedded_pack[] = {0};
const std::size_t embedded_pack_size = 0;

}  // namespace tessera::cuda
