// CRC-32C (Castagnoli, polynomial 0x1EDC6F41 reflected; RFC 3720, appendix B.4), the checksum of records.
#pragma once

#include <cstdint>

namespace hvd_ext {

// Returns the checksum of what `crc` is the checksum of, followed by data. It is 0 for no bytes.
uint32_t Crc32c(uint32_t crc, const void* data, int64_t nbytes);

// The same without instructions of the processor, for tests and for processors that have none.
uint32_t Crc32cPortable(uint32_t crc, const void* data, int64_t nbytes);

}  // namespace hvd_ext
