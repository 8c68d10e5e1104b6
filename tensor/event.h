// A point in the work of a device, to time what runs between two of them.
//   Event start(device), stop(device);
//   start.record(); work(); stop.record();
//   double ms = start.milliseconds_until(stop);   // waits for stop
// On a GPU the points lie on the stream that is current when record() is called; on the CPU they
// are the clock.
#pragma once
#include <chrono>

#include "tensor/device.h"

namespace ebb {

class Event {
 public:
  explicit Event(Device device);
  ~Event();
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  void record();
  double milliseconds_until(const Event& later) const;

 private:
  Device device_;
  void* handle_ = nullptr;  // cudaEvent_t
  std::chrono::steady_clock::time_point time_;
};

namespace gpu {
void* event_create(Device device);
void event_destroy(void* event);
void event_record(void* event, Device device);
double event_milliseconds(void* from, void* to);  // waits for `to`
}  // namespace gpu

}  // namespace ebb
