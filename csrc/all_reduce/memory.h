// Memory in which cards find each other's terms: a card's own, which other processes open, and host memory, which all have mapped.
#pragma once

#include <cstdint>
#include <string>

namespace dsv4::all_reduce {

// Of the current device, by cudaMalloc and not torch's, whose segments cannot always be opened by others. Every byte is 0xff: kNothing.
void* allocate(int64_t bytes);
void release(void* memory);

std::string handle_of(void* memory);
void* open_handle(const std::string& bytes);  // another process's, as the current device sees it
void close_handle(void* memory);

// Host memory that this process has mapped, as the current device sees it.
void* register_host(void* memory, int64_t bytes);
void unregister_host(void* memory);

}  // namespace dsv4::all_reduce
