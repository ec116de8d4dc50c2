// The devices of engines in tests.
#pragma once

#include <map>
#include <memory>
#include <mutex>

#include "engine/device.h"
#include "engine/transport.h"

namespace hvd_ext::test {

using MakeDevice = std::shared_ptr<Device> (*)();

// Makes the device of each rank of Engines; null: the host.
inline MakeDevice& DeviceOfEngines() {
  static MakeDevice make = nullptr;
  return make;
}
inline std::shared_ptr<Device> NewDevice() { return DeviceOfEngines() == nullptr ? nullptr : DeviceOfEngines()(); }

// Devices that transports know before their engines start.
class KnownDevices {
 public:
  static void Note(const Transport* transport, std::shared_ptr<Device> device) {
    std::lock_guard<std::mutex> lock(Known().mutex);
    Known().devices[transport] = std::move(device);
  }
  static std::shared_ptr<Device> Take(const Transport* transport) {
    std::lock_guard<std::mutex> lock(Known().mutex);
    const auto found = Known().devices.find(transport);
    if (found == Known().devices.end()) return NewDevice();
    const std::shared_ptr<Device> device = std::move(found->second);
    Known().devices.erase(found);
    return device;
  }

 private:
  static KnownDevices& Known() {
    static KnownDevices known;
    return known;
  }

  std::mutex mutex;
  std::map<const Transport*, std::shared_ptr<Device>> devices;
};

}  // namespace hvd_ext::test
